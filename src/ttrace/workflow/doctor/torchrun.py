"""A launch of two ranks by the torchrun that users' commands would find."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from ttrace.attach import PLAN_VARIABLE
from ttrace.errors import TTraceError
from ttrace.report.health import TorchrunHealth, TorchrunStage
from ttrace.workflow.doctor import rank
from ttrace.workflow.launch import Launch, LaunchResult

_OPTIONS = ("--standalone", "--nproc-per-node", "2")


def measure_torchrun(timeout: float) -> TorchrunHealth:
    """Launch two ranks that make an all-reduce; every process has ended when this returns."""
    path = shutil.which("torchrun")
    if path is None:
        return TorchrunHealth("", TorchrunStage.MISSING)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="ttrace-doctor-") as folder:
            error = _find_launch_error(path, Path(folder), timeout)
            return _judge(path, time.monotonic() - start, error, sorted(Path(folder).glob("rank-*.json")))
    except (OSError, TTraceError) as failure:
        return TorchrunHealth(path, TorchrunStage.SILENT, time.monotonic() - start, error=str(failure))


def _find_launch_error(torchrun: str, folder: Path, timeout: float) -> str:
    """Launch the ranks and wait; return an empty text if they succeeded."""
    command, log = (torchrun, *_OPTIONS, rank.__file__, str(folder)), folder / "log"
    # All processes of a launch carry its id, so that they can be ended; there is no plan, and nobody reads it.
    environment = {**os.environ, PLAN_VARIABLE: f"{folder}#{uuid.uuid4().hex}"}
    start = time.monotonic()
    with log.open("wb") as output:
        running = Launch(command, output, environment)
        try:
            status: int | None = running.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            running.close()
    if status == 0:
        return ""
    ended = f"it did not end within {timeout:g} s" if status is None else f"it ended with status {status}"
    output_end = LaunchResult(command, status or 0, time.monotonic() - start, log).find_error()
    return f"{ended}\n{output_end}".strip()


def _judge(path: str, seconds: float, error: str, reports: list[Path]) -> TorchrunHealth:
    ranks = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    if not ranks:
        silent = error or "it ended with status 0, but did not run its script"
        return TorchrunHealth(path, TorchrunStage.SILENT, seconds, error=silent)
    python = ranks[0]["python"]
    if not all(about["has_ttrace"] for about in ranks):
        return TorchrunHealth(path, TorchrunStage.FOREIGN, seconds, python, error)
    stage = TorchrunStage.STARTED if error else TorchrunStage.WORKS
    return TorchrunHealth(path, stage, seconds, python, error)
