"""The process that runs one target: `python -m fuzz.worker TARGET RESULT RUNS SECONDS`, which `python -m fuzz` starts.

libFuzzer, in atheris, chooses the inputs by what of our code they reach. It would stop at the first failure. Therefore
failures are caught here and kept, one input for each kind, and the process ends when it has run as much as was asked.
What ends the process itself, libFuzzer reports: a hang, too much memory, and a crash of native code.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from fuzz.target import CORPUS, ROOT, Mutate, Target, load_target

CACHE = ROOT / ".cache" / "fuzz"
"""Inputs that were found by running, and those that failed; not part of the project."""
MAX_KINDS = 20
"""A run ends after so many different failures."""
HANG = 30
"""Seconds after which libFuzzer ends an input that neither ends nor works."""
_MAX_RESIDENT = 4096
"""MiB after which libFuzzer ends the process."""


class Run:
    """The inputs and failures of a target so far."""

    def __init__(self, target: Target, result: Path, *, num_runs: int, seconds: float) -> None:
        from fuzz.meter import Meter  # after atheris has prepared the imports

        self._target, self._result, self._meter = target, result, Meter()
        self._num_runs, self._end = num_runs, time.monotonic() + seconds
        self._start = time.monotonic()
        self._num_inputs = 0
        self._failures: dict[str, str] = {}

    def take(self, data: bytes) -> None:
        """Run an input, and keep it if it fails."""
        self._num_inputs += 1
        failure = self._meter.run(self._target.run, data)
        if failure and failure not in self._failures:
            self._failures[failure] = str(keep_failure(self._target.name, data))
        is_over = self._num_inputs >= self._num_runs or len(self._failures) >= MAX_KINDS
        if is_over or time.monotonic() >= self._end:
            self.write()
            os._exit(0)  # libFuzzer has no other way to end
        if failure or self._num_inputs % 1000 == 0:
            self.write()

    def write(self) -> None:
        """Write the figures, also for a process that will die."""
        seconds = round(time.monotonic() - self._start, 1)
        figures = {"inputs": self._num_inputs, "seconds": seconds, "failures": self._failures}
        self._result.write_text(json.dumps(figures), encoding="utf-8")


def keep_failure(name: str, data: bytes) -> Path:
    """Write an input that failed into a file."""
    folder = CACHE / "failures" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    return path


def main(name: str, result: str, num_runs: str, seconds: str, seed: str) -> None:
    import atheris

    with atheris.instrument_imports(include=["ttrace"]):
        target = load_target(name)
    found, seeds, failures = CACHE / "corpus" / name, CACHE / "seeds" / name, CACHE / "failures" / name
    for folder in (found, seeds, failures):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.make_seeds()):
        (seeds / f"{number:02d}").write_bytes(data)
    words = CACHE / "seeds" / f"{name}.words"
    words.write_text("".join(f'"{_quote(word)}"\n' for word in target.words or ("\n",)), encoding="utf-8")
    run = Run(target, Path(result), num_runs=int(num_runs), seconds=float(seconds))
    options = {
        "seed": seed,  # 0: another one each time
        "max_len": target.max_bytes,
        "timeout": HANG,
        "rss_limit_mb": _MAX_RESIDENT,
        "dict": words,
        "artifact_prefix": f"{failures}{os.sep}",
        "print_final_stats": 0,
        "verbosity": 0,
    }
    kept = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    arguments = [name, *(f"-{key}={value}" for key, value in options.items()), str(found), *kept, str(seeds)]
    more: dict[str, Any] = {}
    if target.mutate is not None:
        more["custom_mutator"] = _make_mutator(target.mutate, target.usual_bytes)
    atheris.Setup(arguments, run.take, **more)
    atheris.Fuzz()


def _make_mutator(mutate: Mutate, usual_bytes: int) -> Any:
    """Make libFuzzer's mutator: mostly the target's own changes, else changes of bytes."""
    import atheris

    def change(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            data = mutate(data, random) if random.random() < 0.6 else bytes(atheris.Mutate(data, max_bytes))
        # Long inputs are rarely better, and always slower.
        return data[:max_bytes] if random.random() < 0.2 else data[: min(max_bytes, usual_bytes)]

    return change


def _quote(word: str) -> str:
    return "".join(chr(byte) if byte < 128 and chr(byte).isalnum() else f"\\x{byte:02x}" for byte in word.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
