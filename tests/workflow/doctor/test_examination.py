"""The examination measures this installation, and goes on where something is broken.

The disk is measured with a real file, and nothing is left of it. Whatever torchrun does, the doctor reports how far it
got, and leaves no process behind.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ttrace
from ttrace.report.health import HealthProblem, TorchrunHealth, TorchrunStage, TorchSupport
from ttrace.values.kernels.choice import list_variants
from ttrace.workflow.doctor.examination import examine, measure_disk, measure_torchrun
from zoo.harness.limits import HANG

pytestmark = pytest.mark.usefixtures("new_environment")


@pytest.fixture
def no_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches have tests of their own."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_torchrun")
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


@pytest.mark.usefixtures("no_torchrun")
def test_a_variant_that_there_is_not_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRACE_KERNELS", "mmx")
    health = examine(tmp_path, HANG)
    assert health.kernels is not None
    assert "no kernels 'mmx'" in health.kernels.error
    assert HealthProblem.KERNELS_BROKEN in health.problems


@pytest.mark.usefixtures("no_torchrun")
def test_everything_else_is_measured_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    health = examine(tmp_path, HANG)
    assert (health.torch, health.kernels, health.accelerators, health.torchrun) == (None, None, None, None)
    assert "torch" in health.torch_error
    assert (health.disk.free_bytes or 0) > 0
    assert health.problems == (HealthProblem.TORCH_BROKEN,)


def test_free_space_and_speed_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path)
    assert disk.error == ""
    assert (disk.free_bytes or 0) > 0
    assert (disk.bytes_per_second or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path / "not" / "yet")
    assert (disk.folder, disk.error) == (tmp_path / "not" / "yet", "")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    disk = measure_disk(tmp_path)
    assert (disk.bytes_per_second, disk.error) == (None, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert measure_disk(tmp_path / "runs").error == "Not a directory"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has a folder that nobody can write into")
def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    disk = measure_disk(Path("/proc/runs"))
    assert disk.bytes_per_second is None
    assert disk.error


Measure = Callable[..., TorchrunHealth]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measure with a torchrun that is this shell script; $4 is the script of a rank, and $5 its folder."""

    def measure_with(script: str, timeout: float = HANG) -> TorchrunHealth:
        torchrun = tmp_path / "torchrun"
        torchrun.write_text(f"#!/bin/sh\n{script}\n")
        torchrun.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return measure_torchrun(timeout)

    return measure_with


def test_no_torchrun_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_torchrun(HANG) == TorchrunHealth("", TorchrunStage.MISSING)


def test_an_error_before_any_rank_is_shown(measure: Measure, tmp_path: Path) -> None:
    health = measure("echo starting; echo ImportError: libfoo.so; exit 3")
    assert (health.path, health.stage) == (str(tmp_path / "torchrun"), TorchrunStage.SILENT)
    assert health.error.splitlines() == ["it ended with status 3", "starting", "ImportError: libfoo.so"]


def test_success_without_a_rank_is_none(measure: Measure) -> None:
    health = measure("exit 0")
    assert (health.stage, health.error) == (
        TorchrunStage.SILENT,
        "it ended with status 0, but did not run its script",
    )


def test_a_torchrun_of_a_python_that_is_gone_is_not_passed_over(measure: Measure, tmp_path: Path) -> None:
    measure("exit 0")
    (tmp_path / "torchrun").write_text("#!/not/there/python\n")
    health = measure_torchrun(HANG)
    assert (health.path, health.stage) == (str(tmp_path / "torchrun"), TorchrunStage.SILENT)
    assert "cannot be started: [Errno 2]" in health.error


def test_a_launch_that_hangs_is_ended_with_all_its_processes(measure: Measure, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    health = measure(f"setsid sleep 1000 & echo $! >> {ids}; sleep 1000 & echo $! >> {ids}; wait", timeout=1.0)
    assert (health.stage, health.error) == (TorchrunStage.SILENT, "it did not end within 1 s")
    processes = [int(line) for line in ids.read_text().split()]
    assert len(processes) == 2
    assert not [process for process in processes if is_running(process)]


def is_running(process: int) -> bool:
    """Whether a process runs; one that has ended may still wait for its parent for a moment."""
    for _ in range(100):
        try:
            if (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.01)
    return True


def test_a_python_without_ttrace_is_named(measure: Measure) -> None:
    health = measure(f'RANK=0 exec {sys.executable} -I -S "$4" "$5"')
    assert (health.stage, health.python) == (TorchrunStage.FOREIGN, sys.executable)


def test_ranks_that_cannot_reduce_have_started(measure: Measure) -> None:
    health = measure(f'env -u WORLD_SIZE RANK=0 {sys.executable} "$4" "$5"')
    assert health.stage is TorchrunStage.STARTED
    assert health.error.splitlines()[-1].startswith("ValueError: Error initializing torch.distributed")


@pytest.mark.slow
def test_the_real_torchrun_starts_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    health = measure_torchrun(HANG)
    assert (health.stage, health.error) == (TorchrunStage.WORKS, "")
    assert Path(health.python).resolve() == Path(sys.executable).resolve()
