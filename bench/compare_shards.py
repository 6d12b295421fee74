"""Time saved by comparing shards in place instead of merging them first.

A whole bf16 tensor is compared with eight shards, zigzag rows as context parallelism cuts them, or columns as tensor
parallelism does; and rows of 64 elements against the same elements side by side.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from bench._ratios import ratios
from ttrace.layouts.region import Region
from ttrace.values.stats import Stats, measure_difference

ZIGZAG, COLUMNS, SHORT = 3.5, 1.8, 3.0
"""The bars: times faster than merging, twice; times slower than contiguous elements."""
SIZE, NUM_SHARDS, RUN, NUM_ROUNDS = 8192, 8, 64, 9
WHOLE = Region.whole((SIZE, SIZE))


def columns() -> list[Region]:
    bounds = range(0, SIZE + 1, SIZE // NUM_SHARDS)
    return [Region((SIZE, SIZE), (((0, SIZE),), (run,))) for run in pairwise(bounds)]


def zigzag() -> list[Region]:
    """Each rank has a run of rows from the front and its mirror image from the back."""
    runs = list(pairwise(range(0, SIZE + 1, SIZE // NUM_SHARDS // 2)))
    return [Region((SIZE, SIZE), ((runs[i], runs[-1 - i]), ((0, SIZE),))) for i in range(NUM_SHARDS)]


def in_place(full: torch.Tensor, regions: list[Region], shards: list[torch.Tensor]) -> Stats:
    total = Stats()
    for region, shard in zip(regions, shards, strict=True):
        for ours, theirs in WHOLE.overlaps(region):
            total = total + measure_difference(ours.of(full), theirs.of(shard))
    return total


def merged(full: torch.Tensor, regions: list[Region], shards: list[torch.Tensor]) -> Stats:
    joined = torch.empty_like(full)
    for region, shard in zip(regions, shards, strict=True):
        region.put(shard, joined)
    return measure_difference(full, joined)


def gain(full: torch.Tensor, other: torch.Tensor, regions: list[Region]) -> float:
    shards = [region.take(other).contiguous() for region in regions]
    one, two = in_place(full, regions, shards), merged(full, regions, shards)
    assert abs(one.dd / two.dd - 1) < 1e-6
    assert one.max_diff == two.max_diff
    runs = {
        "merged": lambda _: merged(full, regions, shards),
        "in place": lambda _: in_place(full, regions, shards),
    }
    return ratios(runs, "merged", NUM_ROUNDS)["in place"]


def slowdown(full: torch.Tensor, other: torch.Tensor) -> float:
    """Of rows of 64 elements over the same elements side by side: a shard of 64 columns after the other, and rows of
    both tensors with as much between them as they hold. The slower of the two."""
    shards = [part.contiguous() for part in other.split(RUN, dim=1)]
    parts = full.split(RUN, dim=1)
    beside = [part.contiguous() for part in parts]
    a, b = (tensor.view(-1, 2, RUN)[:, 0] for tensor in (full, other))
    x, y = a.contiguous(), b.contiguous()
    columns = {
        "contiguous": lambda _: [measure_difference(*pair) for pair in zip(beside, shards, strict=True)],
        "rows": lambda _: [measure_difference(*pair) for pair in zip(parts, shards, strict=True)],
    }
    every_other = {"contiguous": lambda _: [measure_difference(x, y)], "rows": lambda _: [measure_difference(a, b)]}
    return max(1 / ratios(runs, "contiguous", NUM_ROUNDS)["rows"] for runs in (columns, every_other))


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = torch.randn(SIZE, SIZE).bfloat16()
    other = full + torch.randn(SIZE, SIZE).bfloat16() / 256
    gains = gain(full, other, zigzag()), gain(full, other, columns())
    slower = slowdown(full, other)
    print(
        f"compare-shards: in place is {gains[0]:.1f} times faster than merging for zigzag (bar {ZIGZAG}), "
        f"{gains[1]:.1f} for columns (bar {COLUMNS}); rows of {RUN} are {slower:.1f} times slower (bar {SHORT})"
    )
    return int(gains[0] < ZIGZAG or gains[1] < COLUMNS or slower > SHORT)
