"""Every rank records the environment of its run."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.support.commands import script, ttrace
from ttrace.capture.environment import fingerprint_sources, read_flags, read_versions, set_deterministic
from ttrace.capture.observe.events import SessionEvents
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.compat.torch import GENERATED_MODULE
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh
from ttrace.patches import Patches
from ttrace.trace.reader import Trace
from ttrace.trace.seal import fingerprint_file
from zoo.harness.runs import SimulatedRank


def test_every_rank_says_what_it_was_loaded_from_and_by_which_version(tmp_path: Path) -> None:
    """Pipeline stages import what others do not; an edit of that makes the trace stale too."""
    for rank in range(2):
        model, adapter = nn.Linear(4, 4), SimulatedRank(Mesh.of(pp=2), rank)
        session = TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, None, adapter))
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


# Settings that change how kernels round.


TRAINING = """
import os, sys, torch, ttrace
torch.set_float32_matmul_precision(sys.argv[1] if len(sys.argv) > 1 else "highest")
model = torch.nn.Linear(4, 4)
session = ttrace.attach(model)
with session.step():
    print("workspace", os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled())
    (model(session.batch(torch.randn(2, 4))).sum() * len(sys.argv)).backward()
"""


@pytest.mark.own_defaults
def test_flags_are_read_as_they_are() -> None:
    flags = read_flags()
    assert flags["deterministic algorithms"] == "False"
    assert flags["default dtype"] == "float32"
    assert flags["cuda.matmul.allow_bf16_reduced_precision_reduction"] == "True"
    assert flags["accelerator"] == "none"
    assert len(flags) >= 10


def test_flags_are_put_back() -> None:
    before, patches = read_flags(), Patches()
    set_deterministic(patches)
    assert read_flags()["deterministic algorithms"] == read_flags()["cudnn.deterministic"] == "True"
    patches.remove()
    assert read_flags() == before


def test_reading_flags_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_flags()


@pytest.mark.parametrize("method", ["capture_begin", "replay"])
def test_a_graph_is_refused_while_a_step_is_traced(method: str) -> None:
    own = getattr(torch.cuda.CUDAGraph, method)
    with patch_torch(SessionEvents()), pytest.raises(CaptureError, match="Switch CUDA graphs off"):
        getattr(torch.cuda.CUDAGraph, method)(object())
    assert getattr(torch.cuda.CUDAGraph, method) is own


@pytest.mark.slow
def test_flags_that_differ_are_named_and_deterministic_ones_set(tmp_path: Path) -> None:
    command = script(tmp_path, TRAINING)
    arguments = ("--reference", command, "--candidate", f"{command} high", "--out", str(tmp_path / "run"))
    ran = ttrace("run", *arguments, "--deterministic", "--twins", "1", "--no-repeat", "--no-isolate")
    assert ran.returncode == 1, ran.stdout + ran.stderr  # notes on the environment are for those who search a cause
    output = " ".join(ran.stdout.split())
    assert "the two sides ran with different settings of torch: " in output
    assert "float32 matmul precision highest in the reference, high in the candidate" in output
    logs = [path.read_text() for path in (tmp_path / "run").rglob("*.log")]
    assert len(logs) >= 2
    assert all("workspace :4096:8 True" in log for log in logs), logs


def test_memory_that_nothing_has_written_is_not_finite() -> None:
    """Else what a script reads of it would be plausible, or zero on one side."""
    patches = Patches()
    set_deterministic(patches)
    try:
        assert not torch.empty(4).isfinite().any()
        assert not torch.ones(2).new_empty(2).isfinite().any()
    finally:
        patches.remove()
