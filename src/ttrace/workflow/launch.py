"""This module runs one of the user's commands under a plan: its output in a log, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

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


@dataclass(frozen=True)
class Launches:
    """What several threads have launched: only the main thread hears of a signal, and must be able to end them all."""

    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def started(
        self, command: tuple[str, ...], output: IO[bytes], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process with a group of its own, unless all were ended before."""
        with self._lock:
            if self._closed.is_set():
                raise TTraceError(f"{shlex.join(command)} was not started: the run was ended.")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        """Leave nothing of its group."""
        _end_group(process)
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """End whatever still runs, and start nothing more."""
        with self._lock:
            self._closed.set()
            running = list(self._running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # the thread that waits for it does the rest


def launch(command: tuple[str, ...], plan: Plan, *, timeout: float, launches: Launches | None = None) -> Launched:
    """Run the command with tracing switched on, and wait. Its whole process group ends with it."""
    launches = launches or Launches()
    folder = plan.out.parent
    plan_file = folder / f"{plan.out.name}.plan.json"
    plan.model_copy(update={"out": plan.out.resolve()}).save(plan_file)
    log = folder / f"{plan.out.name}.log"
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            environment = {**os.environ, PLAN_VARIABLE: str(plan_file.resolve())}
            process = launches.started(command, output, environment)
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
            launches.ended(process)
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
