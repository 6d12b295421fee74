"""Launch of one of the user's commands under a plan: its output goes to a log, and no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ttrace.attach import PLAN_VARIABLE
from ttrace.automatic.variables import make_variables
from ttrace.capture.environment import WORKSPACE, WORKSPACE_VARIABLE, is_of_script
from ttrace.capture.plan import Plan
from ttrace.capture.process import SIGNAL, STACK
from ttrace.errors import TraceError, TTraceError
from ttrace.report.facts import quote_collective, shorten_place
from ttrace.trace.collectives import COLLECTIVES, decode_collectives
from ttrace.untrusted import Limits, create_file, read_file
from ttrace.workflow import supervisor


@dataclass(frozen=True)
class LaunchResult:
    """How a command ended."""

    command: tuple[str, ...]
    status: int
    seconds: float
    log: Path
    unattached: str | None = None
    """Why automatic attachment found nothing to trace, if it knows; None if no process loaded its hook."""

    def find_error(self, num_lines: int = 15) -> str:
        """Find what went wrong in the log: the first error with its traceback, else the last lines.

        Under torchrun every rank's error comes before a summary, which is more useful only if a signal ended a rank.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        at = next((i for i, line in enumerate(lines) if _ERROR.match(line)), None)
        if at is None:
            return "\n".join(lines[-num_lines:])
        if match := _OURS.match(lines[at]):
            return match["message"]
        if "ChildFailedError" in lines[at]:
            return "\n".join(lines[-num_lines:])
        return "\n".join(lines[max(at - num_lines + 1, 0) : at + 1])

    def suggest_launcher(self) -> str:
        """Suggest torchrun for a script that asked for its rank and has none; nothing if it failed otherwise."""
        if _NO_RANK not in self.log.read_text(errors="replace"):
            return ""
        words = shlex.join(("torchrun", "--standalone", "--nproc-per-node", "1", *self.command[1:]))
        return f"\nThe script needs a launcher. With one rank: {words}"


_NO_RANK = "environment variable RANK expected, but not set"
_ERROR = re.compile(r"(\[rank\d+\]:\s*)?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit)\b(:|$)")
_OURS = re.compile(r"(\[rank\d+\]:\s*)?ttrace\.errors\.\w+: (?P<message>.*)")


def split_command(command: str) -> tuple[str, ...]:
    """Split a command into its words; no shell reads it."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise TTraceError(f"the command {command!r} cannot be read: {error}.") from None
    if not words:
        raise TTraceError("the command is empty.")
    return words


class Launch:
    """A command that runs below a supervisor, which ends all its processes when this process asks for it, or dies."""

    def __init__(self, command: tuple[str, ...], output: IO[bytes], environment: dict[str, str]) -> None:
        self._words = shlex.join(command)
        self._plan_address = environment[PLAN_VARIABLE]
        self._control, theirs = socket.socketpair()
        with theirs:
            # In a session of its own: a Ctrl-C in the terminal, or the end of it, must not reach the supervisor.
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", supervisor.__file__, *command),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int:
        """Wait for the command and everything that it started; return its status, negative for a signal."""
        self._process.wait(seconds)
        report = self._read_report()
        if report["error"]:
            raise TTraceError(
                f"{self._words} cannot be started: {report['error']}. No shell reads the command: write env A=B ... "
                "for a variable, and bash -c '...' for more."
            )
        _refuse_survivors(self._words, report["survivors"])
        if report["status"] is None:
            raise TTraceError(f"{self._words} was ended: the run was ended, or its supervisor got a signal to end.")
        return int(report["status"])

    def stop(self) -> None:
        """Ask the supervisor to end everything; does not wait for it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End everything; processes that the supervisor could not end are named in an error."""
        if self._process.returncode is None:
            self.stop()
            try:
                self._process.wait(_LONGEST_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            survivors = self._read_report()["survivors"]
            self._control.close()
            _refuse_survivors(self._words, survivors)
        self._control.close()

    def _read_report(self) -> dict[str, Any]:
        """Read the supervisor's report; if it was killed, do its work here."""
        received = b""
        with contextlib.suppress(OSError):
            while part := self._control.recv(1 << 16):
                received += part
        try:
            report: dict[str, Any] = json.loads(received)
            return report
        except ValueError:
            left = supervisor.end_all(lambda: supervisor.find_carriers(self._plan_address))
            return {"status": -signal.SIGKILL, "error": "", "survivors": supervisor.describe(left)}


_LONGEST_END = supervisor.GRACE + supervisor.LONGEST_KILL + 2.0


def _refuse_survivors(words: str, survivors: Sequence[str]) -> None:
    if survivors:
        raise TTraceError(
            f"{words} left processes that could not be ended: {', '.join(survivors)}. End them before the next run."
        )


@dataclass(frozen=True)
class Launches:
    """The launches of several threads: only the main thread gets signals, and must be able to end them all."""

    _running: set[Launch] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def start(self, command: tuple[str, ...], output: IO[bytes], environment: dict[str, str]) -> Launch:
        """Launch a command, unless `close` was called before."""
        with self._lock:
            if self._closed.is_set():
                raise TTraceError(f"{shlex.join(command)} was not started: the run was ended.")
            started = Launch(command, output, environment)
            self._running.add(started)
            return started

    def end(self, running: Launch) -> None:
        """End one launch and all its processes."""
        with self._lock:
            self._running.discard(running)
        running.close()

    def close(self) -> None:
        """End whatever still runs, and refuse to start more."""
        with self._lock:
            self._closed.set()
            running = list(self._running)
        for one in running:
            one.stop()  # the thread that waits for it does the rest


def launch(command: tuple[str, ...], plan: Plan, *, timeout: float, launches: Launches | None = None) -> LaunchResult:
    """Run the command with tracing switched on, and wait. Every process that it started ends with it."""
    launches = launches or Launches()
    folder = plan.out.parent
    plan_file = folder / f"{plan.out.name}.plan.json"
    plan.model_copy(update={"out": plan.out.resolve()}).save(plan_file)
    log, mark = (folder / f"{plan.out.name}.{ending}" for ending in ("log", "hooked"))
    mark.unlink(missing_ok=True)
    start = time.monotonic()
    with os.fdopen(create_file(log), "wb") as output:
        environment = {**os.environ, PLAN_VARIABLE: plan.address(plan_file.resolve())}
        if plan.deterministic:
            environment.setdefault(WORKSPACE_VARIABLE, WORKSPACE)
        if plan.attach == "auto":
            environment.update(make_variables(environment, mark.resolve()))
        running = launches.start(command, output, environment)
        try:
            status = running.wait(timeout)
        except subprocess.TimeoutExpired:
            places = describe_hang(plan, supervisor.find_carriers(environment[PLAN_VARIABLE]))
            raise TTraceError(
                f"{shlex.join(command)} did not end within {timeout:.0f} s. "
                f"{''.join(f'{place}. ' for place in places)}Its output is in {log}; a longer --timeout "
                "gives it more time."
            ) from None
        finally:
            launches.end(running)
            unattached = mark.read_text(encoding="utf-8") if mark.exists() else None
            mark.unlink(missing_ok=True)
    return LaunchResult(command, status, time.monotonic() - start, log, unattached)


def describe_commit(folder: Path) -> str:
    """Return the commit, with a plus if files differ from it; an empty text where there is none."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


_PATIENCE = 2.0
"""Seconds in which a process writes its stack."""
_LOOK = 0.02
"""Seconds between two looks at these files."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def describe_hang(plan: Plan, processes: Set[int]) -> list[str]:
    """Ask the ranks of a launch that does not end for their stacks, and describe where each is.

    That is the line of the script, and the last collective. `processes` are those of the launch.
    """
    folders = [folder for each in (plan, *plan.then) for folder in sorted(each.out.glob("rank-*"))]
    asked = [folder for folder in folders if _ask(folder / STACK, processes)]
    deadline = time.monotonic() + _PATIENCE
    while any(not _list_frames(folder / STACK) for folder in asked) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return [_describe_rank(folder) for folder in asked]


def _ask(path: Path, processes: Set[int]) -> bool:
    """Ask the process that offers its stack in this file, if it still runs and is one of this launch."""
    try:
        process = int(path.read_text(encoding="utf-8").partition("\n")[0])
    except (OSError, ValueError):
        return False
    if SIGNAL is None or process not in processes:
        return False
    with contextlib.suppress(OSError):
        os.kill(process, SIGNAL)
    return True


def _describe_rank(folder: Path) -> str:
    rank = int(folder.name.removeprefix("rank-"))
    frames = _list_frames(folder / STACK)
    file, line, function = next((frame for frame in frames if is_of_script(frame[0])), ("", "", ""))
    where = f"at {shorten_place(f'{file}:{line}')} in {function}" if file else "in code that is not the script's"
    return f"Rank {rank} is {where}; {_describe_last(folder / COLLECTIVES)}"


def _list_frames(path: Path) -> list[tuple[str, str, str]]:
    """List the frames of a stack, the innermost first: file, line and function."""
    try:
        return [match.groups() for match in _FRAME.finditer(path.read_text(errors="replace"))]  # type: ignore[misc]  # three
    except OSError:
        return []


def _describe_last(path: Path) -> str:
    try:
        collectives = decode_collectives(read_file(path, Limits.get().lines_bytes), str(path), None)
    except (OSError, TraceError):
        collectives = ()
    if not collectives:
        return "it has issued no collective in this step"
    last = collectives[-1]
    where = f", in the {last.phase.value} of {last.module}" if last.module else ""
    return f"its last collective, number {last.order + 1}, is {quote_collective(last)}{where}"
