"""This module measures what a verdict costs: a clean `ttrace run` against the two bare commands, in CPU time.

The model is GPT-2 124M from transformers, and the candidate is sharded by FSDP2 over two ranks. A bare command runs
one step. All processes are counted from their start, with the import of torch. The bar is for a script that calls
`ttrace.attach`; an unchanged script, of which one more step is watched on each side, is measured beside it. With
`--all`, the disk that the traces take in full and as sketches is measured too.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from zoo.harness.limits import HANG

RATIO = 1.8
"""The bar: CPU time of the run over that of the two bare commands."""
DISK = {"full": 3.0e9, "sketch": 50e6}
"""The bars of what the traces take, in bytes."""
NUM_ROUNDS = 3
SCRIPT = Path(__file__).parent / "_gpt2.py"
REFERENCE = f"{sys.executable} {SCRIPT}"
CANDIDATE = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {SCRIPT}"


def spend(command: list[str], **environment: str) -> float:
    """Run a command, and return the CPU seconds of all its processes."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return used.ru_utime + used.ru_stime


def trace(folder: Path, record: str = "auto", **environment: str) -> float:
    """Run TTrace in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    sides = ["--reference", REFERENCE, "--candidate", CANDIDATE]
    options = ["--out", str(folder), "--record", record, "--timeout", str(HANG)]
    return spend([sys.executable, "-m", "ttrace", "run", *sides, *options], **environment)


def main(*options: str) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        ways: dict[str, Callable[[], float]] = {
            "bare": lambda: sum(spend(command.split(), STEPS="1") for command in (REFERENCE, CANDIDATE)),
            "attached": lambda: trace(out, ATTACH="1"),
            "unchanged": lambda: trace(out),
        }
        rounds, chance = [], random.Random(0)
        for _ in range(NUM_ROUNDS):
            rounds.append({way: ways[way]() for way in chance.sample(list(ways), len(ways))})
            print(", ".join(f"{way} {rounds[-1][way]:.0f} s of CPU" for way in ways), flush=True)
        is_met = True
        for record, bar in DISK.items() if "--all" in options else ():
            trace(out, record)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            is_met = is_met and size <= bar
            print(f"--record {record}: {size / 1e6:,.0f} MB (bar {bar / 1e6:,.0f})")
    attached, unchanged = (
        statistics.median(found[way] / found["bare"] for found in rounds) for way in ("attached", "unchanged")
    )
    print(
        f"a clean run takes {attached:.2f} times the CPU time of the two bare commands (bar {RATIO}), "
        f"{unchanged:.2f} if the script is unchanged"
    )
    return 0 if is_met and attached <= RATIO else 1
