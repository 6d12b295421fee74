"""The examination measures this installation, and goes on where something is broken."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

import ttrace
from ttrace.report.health import HealthProblem, TorchrunStage, TorchSupport
from ttrace.values.kernels.library import list_variants
from ttrace.workflow.doctor.examination import examine
from zoo.harness.limits import HANG

pytestmark = pytest.mark.usefixtures("new_environment")


@pytest.fixture(autouse=True)
def no_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches have tests of their own."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_this_installation_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTRACE_KERNELS", raising=False)
    health = examine(tmp_path, HANG)
    assert health.versions["python"] == platform.python_version()
    assert health.versions["ttrace"] == ttrace.__version__
    assert {"megatron-core", "transformers", "deepspeed"} <= set(health.versions)
    assert health.torch is not None
    assert health.torch.version == torch.__version__
    assert health.torch.support in (TorchSupport.PARTIAL, TorchSupport.SUPPORTED, TorchSupport.UNTESTED)
    assert health.kernels is not None
    assert health.kernels.runnable == list_variants()
    assert health.kernels.variant == next(iter(list_variants()), "torch")
    assert health.accelerators is not None
    assert bool(health.accelerators.names) == torch.accelerator.is_available()
    assert health.torchrun is not None
    assert health.torchrun.stage is TorchrunStage.MISSING
    assert health.problems == (HealthProblem.TORCHRUN_MISSING,)


def test_a_variant_that_there_is_not_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRACE_KERNELS", "mmx")
    health = examine(tmp_path, HANG)
    assert health.kernels is not None
    assert "no kernels 'mmx'" in health.kernels.error
    assert HealthProblem.KERNELS_BROKEN in health.problems


def test_everything_else_is_measured_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    health = examine(tmp_path, HANG)
    assert (health.torch, health.kernels, health.accelerators, health.torchrun) == (None, None, None, None)
    assert "torch" in health.torch_error
    assert (health.disk.free_bytes or 0) > 0
    assert health.problems == (HealthProblem.TORCH_BROKEN,)
