"""Command line of fuzzing: `python -m fuzz TARGET --seconds 60`, `--all`, `--kernels`; without a target it lists them.

An input fails if it raises anything but a TTraceError, if it takes more than 2 s, or more than 256 MiB. It is written
to a file, and `python -m fuzz TARGET FILE` runs it again. Once it is understood it belongs into `fuzz/corpus/TARGET`;
until the code is corrected, into `fuzz/open/TARGET`, which nothing runs by itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzz.target import MODULES, NAMES, ROOT, load_target
from fuzz.worker import CACHE, HANG

SECONDS = 60.0
NUM_SHAPES = 100_000
_IN_MEMORY = Path("/dev/shm")
"""Files of inputs are written here, if it exists: a disk takes milliseconds for each."""
_BY_LIBFUZZER = "*-*"
"""Inputs that ended the process: crash-..., timeout-..., oom-..."""


@dataclass(frozen=True)
class Figures:
    """What came of a target."""

    name: str
    num_inputs: int
    seconds: float
    failures: dict[str, Path]
    """By what happened, the file of the first input."""
    log: str = ""
    """The last words of a process that died."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Hostile inputs, and what becomes of them.")
    parser.add_argument("target", nargs="?", choices=MODULES, metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="run these inputs only, and show errors")
    parser.add_argument("--all", action="store_true", help="run every target")
    parser.add_argument("--seconds", type=float, help=f"run each target for so long; {SECONDS:g} by default")
    parser.add_argument("--runs", type=int, help="run so many inputs of each target, however long that takes")
    parser.add_argument("--seed", type=int, default=0, help="choose the same inputs each time; by default, others")
    parser.add_argument("--jobs", type=int, default=1, help="with --all: how many targets run at the same time")
    parser.add_argument(
        "--kernels", action="store_true", help=f"run kernels under sanitizers, on {NUM_SHAPES} shapes or --runs"
    )
    chosen = parser.parse_args(arguments)
    if chosen.kernels:
        from fuzz.kernels import run_kernels

        return run_kernels(chosen.runs or NUM_SHAPES)
    names = NAMES if chosen.all else (chosen.target,) if chosen.target else ()
    if not names:
        print("\n".join(NAMES))
        return 0
    if chosen.files:
        return _repeat(chosen.target, chosen.files)
    if importlib.util.find_spec("atheris") is None:
        print("Fuzzing needs atheris, which has wheels for Linux: pip install atheris.", file=sys.stderr)
        return 2
    seconds = chosen.seconds or (math.inf if chosen.runs else SECONDS)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found = list(pool.map(lambda name: _run(name, chosen.runs or sys.maxsize, seconds, chosen.seed), names))
    num_failures = sum(len(figures.failures) for figures in found)
    print(f"fuzz: {sum(figures.num_inputs for figures in found)} inputs, {num_failures} failures")
    return 1 if num_failures else 0


def _run(name: str, num_runs: int, seconds: float, seed: int) -> Figures:
    """Run a target in a process of its own, and print its figure."""
    folder = CACHE / "failures" / name
    for path in folder.glob(_BY_LIBFUZZER):
        path.unlink()
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        with log.open("wb") as file:
            numbers = map(str, (num_runs, seconds, seed))
            command = [sys.executable, "-m", "fuzz.worker", name, str(result), *numbers]
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
            environment = {**os.environ, "TMPDIR": scratch, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
            status = subprocess.run(command, stdout=file, stderr=file, env=environment, cwd=ROOT).returncode
        known = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        said = "" if status == 0 else log.read_text(encoding="utf-8", errors="replace")
    failures = {what: Path(path) for what, path in known.get("failures", {}).items()}
    for path in sorted(folder.glob(_BY_LIBFUZZER)):
        kind = path.name.partition("-")[0]
        failures[f"more than {HANG} s" if kind == "timeout" else f"the process ended: {kind}"] = path
    if status and not failures:
        failures[f"the process ended with {status}"] = folder
    figures = Figures(name, known.get("inputs", 0), known.get("seconds", 0.0), failures, said)
    _show(figures)
    return figures


def _show(figures: Figures) -> None:
    lines = [
        f"{figures.name}: {figures.num_inputs} inputs, {len(figures.failures)} failures, {figures.seconds:.0f} s",
        *figures.log.splitlines()[-8:],
    ]
    for what, path in figures.failures.items():
        lines += [f"  {what}", f"    python -m fuzz {figures.name} {_shorten(path)}"]
    print("\n".join(lines), flush=True)


def _shorten(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _repeat(name: str, files: list[Path]) -> int:
    """Run inputs once more; an error is shown with its traceback."""
    from fuzz.meter import Meter
    from ttrace.errors import TTraceError

    target, meter, num_failures = load_target(name), Meter(), 0
    for file in files:
        data = file.read_bytes()
        failure = meter.run(target.run, data)
        num_failures += bool(failure)
        print(f"{file}: {failure or 'no failure'}")
        if failure and not failure.startswith("more than"):
            try:
                target.run(data)
            except TTraceError:
                print("not again")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
