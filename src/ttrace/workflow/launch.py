"""This module runs one of the user's commands under a plan: its output in a log, nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ttrace.attach import PLAN_VARIABLE
from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError


@dataclass(frozen=True)
class Launched:
    """How a command ended."""

    command: tuple[str, ...]
    status: int
    seconds: float
    log: Path

    def complaint(self, num_lines: int = 15) -> str:
        """What went wrong, as the log tells it: the first error with its traceback, else the last lines.

        Under torchrun every rank's error stands above a summary that says nothing.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        at = next((i for i, line in enumerate(lines) if _ERROR.match(line)), None)
        if at is None:
            return "\n".join(lines[-num_lines:])
        if match := _OURS.match(lines[at]):
            return match["message"]
        return "\n".join(lines[max(at - num_lines + 1, 0) : at + 1])


_ERROR = re.compile(r"(\[rank\d+\]:\s*)?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit)\b(:|$)")
_OURS = re.compile(r"(\[rank\d+\]:\s*)?ttrace\.errors\.\w+: (?P<message>.*)")


def split_command(command: str) -> tuple[str, ...]:
    """The words of a command; no shell reads it."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise TTraceError(f"the command {command!r} cannot be read: {error}.") from None
    if not words:
        raise TTraceError("the command is empty.")
    return words


def launch(command: tuple[str, ...], plan: Plan, *, timeout: float) -> Launched:
    """Run the command with tracing switched on, and wait. Its whole process group ends with it."""
    folder = plan.out.parent
    plan_file = folder / f"{plan.out.name}.plan.json"
    plan.model_copy(update={"out": plan.out.resolve()}).save(plan_file)
    log = folder / f"{plan.out.name}.log"
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PLAN_VARIABLE: str(plan_file.resolve())},
                start_new_session=True,
            )
        except OSError as error:
            raise TTraceError(
                f"{shlex.join(command)} cannot be started: {error}. No shell reads the command: write env A=B ... for "
                "a variable, and bash -c '...' for more."
            ) from None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TTraceError(
                f"{shlex.join(command)} did not end within {timeout:.0f} s. Its output is in {log}; "
                "a longer --timeout gives it more time."
            ) from None
        finally:
            _end_group(process)
    return Launched(command, status, time.monotonic() - start, log)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind: torchrun's workers are in the group of torchrun."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
