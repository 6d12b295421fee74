"""Whatever torchrun does, the doctor says how far it got, and leaves no process behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ttrace.report.health import TorchrunHealth, TorchrunStage
from ttrace.workflow.doctor.torchrun import measure_torchrun
from zoo.harness.limits import HANG

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
