"""Every rank records the environment of its run."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ttrace.capture.environment import fingerprint_sources, read_versions
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.compat.torch import GENERATED_MODULE
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace
from ttrace.trace.storage.fingerprint import fingerprint_file
from zoo.harness.runs import SimulatedRank


def test_every_rank_says_what_it_was_loaded_from_and_by_which_version(tmp_path: Path) -> None:
    """Pipeline stages import what others do not; an edit of that makes the trace stale too."""
    for rank in range(2):
        model, adapter = nn.Linear(4, 4), SimulatedRank(Mesh.of(pp=2), rank)
        session = TracingSession(Plan(out=tmp_path, stop=False), model, None, adapter, Rules())
        with session.step():
            model(session.batch(torch.randn(2, 4))).sum().backward()
    ours = Path(__file__)
    for written in Trace(tmp_path).ranks:
        assert written.end is not None
        assert written.end.sources[str(ours)] == fingerprint_file(ours)
        assert {"python", "torch", "ttrace"} <= written.manifest.versions.keys()


def test_a_package_that_loads_lazily_is_named_with_its_version() -> None:
    """Such a package does not have `__version__` among its attributes."""
    transformers = pytest.importorskip("transformers")
    assert "__version__" not in vars(transformers)
    assert read_versions()["transformers"] == metadata.version("transformers")


def test_a_file_that_torch_writes_when_it_starts_makes_no_trace_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = ModuleType(GENERATED_MODULE)
    generated.__file__ = str(tmp_path / "generated.py")
    (tmp_path / "generated.py").touch()
    monkeypatch.setitem(sys.modules, GENERATED_MODULE, generated)
    assert generated.__file__ not in fingerprint_sources()
