"""Speed of writing a trace to disk, compared with writing the same number of bytes.

Both begin with tensors in memory and end when all is on the disk: the trace is closed, the raw file synced. The raw
way writes one file front to back, a megabyte at a time, through the page cache, as most programs do. Time is that of
the clock on the wall, since a disk is waited for; rounds alternate in random order, and each gives one ratio.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench._checksums import without_checksums
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Manifest, Record
from ttrace.trace.writer import Writer

SHARE = 0.8
"""The bar: of the speed of a raw write."""
NUM_TENSORS, SHAPE, NUM_ROUNDS = 192, (1024, 1024), 7
_BLOCK = 1 << 20


def write_raw(folder: Path, tensors: list[torch.Tensor]) -> None:
    with (folder / "raw").open("wb", buffering=0) as file:
        for tensor in tensors:
            data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]  # it is a buffer
            for begin in range(0, len(data), _BLOCK):
                file.write(data[begin : begin + _BLOCK])
        os.fsync(file.fileno())


def write_trace(folder: Path, tensors: list[torch.Tensor]) -> None:
    writer = Writer(folder / "trace", Manifest(role="reference", rank=0, num_ranks=1, mesh="", seed=0))
    for number, tensor in enumerate(tensors):
        tensor_id = TensorId.parse(f"0/0/layers.{number}/output")
        writer.write(Record(tensor_id, SHAPE, tensor.dtype, Region.whole(SHAPE)), tensor)
    writer.close(End(num_steps=1))


def write_unchecked(folder: Path, tensors: list[torch.Tensor]) -> None:
    with without_checksums():
        write_trace(folder, tensors)


def main() -> int:
    torch.set_num_threads(1)
    tensors = [torch.randn(SHAPE) for _ in range(NUM_TENSORS)]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    ways = {"raw": write_raw, "trace": write_trace, "without checksums": write_unchecked}
    shares: dict[str, list[float]] = {way: [] for way in ways}
    chance = random.Random(0)
    for number in range(NUM_ROUNDS + 1):
        seconds = {}
        for way in chance.sample(list(ways), len(ways)):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be no disk
                start = time.perf_counter()
                ways[way](Path(folder), tensors)
                seconds[way] = time.perf_counter() - start
        if number:  # the first warms up
            for way in ways:
                shares[way].append(seconds["raw"] / seconds[way])
            print(", ".join(f"{way} {seconds[way]:.2f} s ({shares[way][-1]:.2f})" for way in ways))
    share, unchecked = (statistics.median(shares[way]) for way in ("trace", "without checksums"))
    print(
        f"record: {share:.2f} of the speed of a raw write of {num_bytes / 1e6:.0f} MB with fsync, {unchecked:.2f} "
        f"without checksums (bar {SHARE})"
    )
    return int(share < SHARE)
