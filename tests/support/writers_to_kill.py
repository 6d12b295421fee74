"""Script that starts writers and kills each at another moment; test_crash.py looks at what they leave.

It runs as a script because only a process with one thread may fork, and children of a process with torch start at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.support.rank_traces import manifest
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Record
from ttrace.trace.writer import Writer
from ttrace.values.generate import Normal, generate_values
from zoo.harness.limits import HANG

NUM_KILLS = 50
SIZES = (
    (40, 2_000, 1 << 28, 1 << 16),
    (300, 3_000, 100_000, 1 << 26),
    (60, 60_000, 500_000, 1 << 26),
    (20, 600_000, 1 << 28, 1 << 22),
    (1500, 1, 1 << 28, 1),
)
"""Kinds of traces: number of records, elements of the largest, bytes per chunk, bytes held. Some have many chunks, some
one; some write whenever a buffer is full, some when a chunk is full."""


def expected(i: int, largest: int) -> tuple[Record, torch.Tensor]:
    """Make record i of a trace: its id determines every bit."""
    name = TensorId.of(0, i, f"layers.{i}", Kind.OUTPUT)
    dtype = (torch.float32, torch.bfloat16, torch.float64)[i % 3]
    region = Region.whole((1 + i * 7919 % largest,))
    tensor = generate_values(name, region, dtype=dtype, distribution=Normal())
    return Record(name, region.shape, dtype, region, microbatch=i, values=Normal()), tensor


def write(folder: Path, size: tuple[int, int, int, int]) -> None:
    num_records, largest, chunk_bytes, max_bytes_held = size
    writer = Writer(folder, manifest(), chunk_bytes=chunk_bytes, max_bytes_held=max_bytes_held)
    for i in range(num_records):
        writer.write(*expected(i, largest))
    writer.close(End(num_steps=1))


def start(folder: Path, size: tuple[int, int, int, int]) -> int:
    if child := os.fork():
        return child
    try:
        write(folder, size)
        time.sleep(7200)
    finally:
        os._exit(1)


def wait(folder: Path, share: float, num_records: int) -> None:
    """Wait until about this share of the records is written: 0 returns at once, and 1 waits for the end."""
    rank = folder / "rank-00000"
    records, deadline = rank / "records.jsonl", time.monotonic() + HANG / NUM_KILLS
    while time.monotonic() < deadline:
        if share >= 1 and (rank / "end.json").exists():
            return
        if share < 1 and (share <= 0 or _lines(records) >= share * num_records):
            return


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return -1


def main(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(NUM_KILLS):
        size = SIZES[number % len(SIZES)]
        # From before the start to after the end, each moment blurred by up to a few milliseconds.
        share = 1.2 * (number // len(SIZES) + chance.random()) / (NUM_KILLS // len(SIZES)) - 0.1
        target = folder / f"{number:03d}"
        child = start(target, size)
        try:
            wait(target, share, size[0])
            time.sleep(chance.choice((0.0, chance.random() * 0.004)))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(json.dumps({"folder": str(target), "size": size}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
