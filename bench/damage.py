"""Disturbed runs, and the number of wrong answers, which must be zero. `--quick` disturbs few.

One bit of one file of a run is flipped, and the run is judged again, in this process: either the verdict and all
findings stay as they were, or the check refuses to judge and names the file. And `ttrace run` is killed at a random
moment, its candidate under torchrun: nothing of it is left after ten seconds (`--quick` waits longer), and the same
command, started at once in the same folder, gives the undisturbed verdict. Both are done to a clean candidate and to
one with a bug.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ttrace.cli import app
from ttrace.errors import TTraceError
from ttrace.trace.writer import HEADER_BYTES
from zoo.harness.limits import HANG

NUM_FLIPS, NUM_KILLS = 2000, 300
QUICK_FLIPS, QUICK_KILLS = 30, 5
LONGEST_LEFT, QUICK_LEFT = 10.0, 300.0
"""Seconds after a kill in which all processes must have ended: the bar, and what a busy machine may need."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
IN_HEADER = 0.1
"""Of the flips in a chunk, how many hit its header, which is mostly spaces and long."""
SCRIPT = Path(__file__).with_name("_damaged.py")
MARK = "TTRACE_BENCH_DAMAGE"
"""The environment variable that identifies all processes of one run."""

Essence = tuple[Any, ...]


@dataclass(frozen=True)
class Sample:
    """An undisturbed run: its folder, whether it has a bug, what it found, and how long it took."""

    folder: Path
    has_bug: bool
    code: int
    found: Essence
    seconds: float


def main(*options: str) -> int:
    args = _parsed(options)
    generator = random.Random(args.seed)
    # A shell that starts this in the background has it ignore SIGINT, and every run that it starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ttrace-damage-") as name:
        samples = [_sample(Path(name), has_bug=has_bug) for has_bug in (False, True)]
        flips, kills = Counter[str](), Counter[str]()
        for number in range(args.flips):
            _flip(samples[number % 2], generator, flips)
        print(f"flips: {dict(flips)}", flush=True)
        for number in range(args.kills):
            # Both samples get all signals.
            _kill(samples[number // len(SIGNALS) % 2], SIGNALS[number % len(SIGNALS)], generator, kills, args.left)
            if number % 20 == 19 or number == args.kills - 1:
                print(f"kills: {dict(kills)}", flush=True)
    wrong = sum(count for outcome, count in (flips + kills).items() if outcome.startswith("wrong"))
    print(f"damage: {wrong} wrong answers to {args.flips} flipped bits and {args.kills} kills (bar 0)")
    return int(wrong > 0)


def _parsed(options: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench damage")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FLIPS} flips and {QUICK_KILLS} kills")
    parser.add_argument("--flips", type=int)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(options)
    args.flips = args.flips if args.flips is not None else QUICK_FLIPS if args.quick else NUM_FLIPS
    args.kills = args.kills if args.kills is not None else QUICK_KILLS if args.quick else NUM_KILLS
    args.left = QUICK_LEFT if args.quick else LONGEST_LEFT
    return args


def _sample(folder: Path, *, has_bug: bool) -> Sample:
    out, start = folder / ("buggy" if has_bug else "clean"), time.monotonic()
    process = _started(out, has_bug=has_bug)
    _, output = process.communicate(timeout=HANG)
    assert process.returncode == int(has_bug), output
    return Sample(out, has_bug, process.returncode, _essence(_report(out)), time.monotonic() - start)


def _started(out: Path, *, has_bug: bool, mark: str = "") -> subprocess.Popen[str]:
    """`ttrace run`, with torchrun."""
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    words = ("--reference", f"{sys.executable} {SCRIPT}", "--twins", "2", "--no-isolate", "--no-repeat")
    candidate = f"{torchrun} {SCRIPT}{' --bug' if has_bug else ''}"
    return subprocess.Popen(
        [sys.executable, "-m", "ttrace", "run", "--out", str(out), "--candidate", candidate, *words],
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def _essence(report: dict[str, Any]) -> Essence:
    """What must not change: the verdict, the findings with their causes, and how many tensors ended how."""
    findings = [(one["id"], one["cause"], one["sentence"]) for one in report["findings"]]
    return report["exit"], report["counts"], findings, report["problems"]


def _flip(sample: Sample, generator: random.Random, outcomes: Counter[str]) -> None:
    files = sorted(path for path in sample.folder.rglob("*") if path.is_file() and path.stat().st_size)
    file = generator.choice(files)
    kept = file.read_bytes()
    is_chunk = len(kept) > HEADER_BYTES and file.suffix == ".safetensors"
    first, last = (HEADER_BYTES, len(kept)) if is_chunk and generator.random() > IN_HEADER else (0, len(kept))
    at, bit = generator.randrange(first, last), generator.randrange(8)
    changed = bytearray(kept)
    changed[at] ^= 1 << bit
    file.write_bytes(changed)
    try:
        outcome = _judged(sample, file)
    finally:
        file.write_bytes(kept)
    outcomes[outcome] += 1
    if outcome.startswith("wrong"):
        print(f"{file.relative_to(sample.folder)}, byte {at}, bit {bit}: {outcome}", flush=True)


def _judged(sample: Sample, file: Path) -> str:
    """What became of the verdict with this file changed."""
    done = CliRunner().invoke(app, ["check", str(sample.folder), "--json"])
    if done.exit_code == 2 or isinstance(done.exception, TTraceError):
        output = str(done.exception) + done.stdout
        return "refused" if f"{file.parent.name}/{file.name}" in output else "wrong: refused without naming the file"
    if not isinstance(done.exception, SystemExit | None):
        return f"wrong: {type(done.exception).__name__}"
    if done.exit_code != sample.code:
        return f"wrong: exit {done.exit_code} in place of {sample.code}"
    return "as before" if _essence(json.loads(done.stdout)) == sample.found else "wrong: other findings"


def _kill(
    sample: Sample, number: signal.Signals, generator: random.Random, outcomes: Counter[str], longest_left: float
) -> None:
    out, mark, after = sample.folder.with_name("killed"), uuid.uuid4().hex, generator.uniform(0, sample.seconds)
    process = _started(out, has_bug=sample.has_bug, mark=mark)
    time.sleep(after)
    process.send_signal(number)
    deadline = time.monotonic() + longest_left
    process.communicate(timeout=HANG)
    again = _started(out, has_bug=sample.has_bug)  # at once: orphans would meet it
    found = list(_problems_of_kill(sample, process.returncode, mark, deadline))
    try:
        _, output = again.communicate(timeout=HANG)
        if again.returncode != sample.code or _essence(_report(out)) != sample.found:
            found.append(f"wrong: the next run ended with {again.returncode}")
            print(output)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        again.kill()
        found.append(f"wrong: the next run left no report ({type(error).__name__})")
    shutil.rmtree(out, ignore_errors=True)
    for outcome in found or ["as before" if process.returncode != sample.code else "as before: it had ended"]:
        outcomes[outcome] += 1
        if found:
            print(f"{number.name} after {after:.2f} s, has a bug: {sample.has_bug}: {outcome}", flush=True)


def _problems_of_kill(sample: Sample, code: int, mark: str, deadline: float) -> Iterator[str]:
    if code in (0, 1) and code != sample.code:
        yield f"wrong: the killed run ended with {code}"
    while (left := _carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        yield "wrong: processes are left"
        for process in left:
            os.kill(process, signal.SIGKILL)


def _carriers(mark: str) -> list[int]:
    """The processes that have this mark in their environment; a zombie has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found
