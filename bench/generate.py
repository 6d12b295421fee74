"""This module measures generation of a rank's shard against `torch.randn` of as many numbers, and that bits agree."""

from __future__ import annotations

from itertools import pairwise

import torch

from bench._memory import measured
from bench._ratios import ratios
from ttrace.layouts.region import Region
from ttrace.values.generate import Normal, generate_values
from ttrace.values.kernels.choice import TORCH, list_variants, use_kernels

SPEED, MEMORY = 1.5, 1.1
"""The bars: times `torch.randn`; peak memory in shards."""
SHAPE, NUM_RANKS, NUM_ROUNDS = (32768, 8192), 8, 7
NAME = "layers.3.mlp.fc1.weight"


def cuts(shape: tuple[int, int], num_ranks: int) -> dict[str, list[Region]]:
    """Rows, columns, and zigzag rows of all ranks."""
    rows, columns = shape
    by_row, by_column = (list(pairwise(range(0, size + 1, size // num_ranks))) for size in shape)
    half = list(pairwise(range(0, rows + 1, rows // num_ranks // 2)))
    return {
        "rows": [Region(shape, ((run,), ((0, columns),))) for run in by_row],
        "columns": [Region(shape, (((0, rows),), (run,))) for run in by_column],
        "zigzag": [Region(shape, ((half[i], half[-1 - i]), ((0, columns),))) for i in range(num_ranks)],
    }


def made(region: Region, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return generate_values(NAME, region, dtype=dtype, distribution=Normal(0.0, 0.02))


def peak(region: Region) -> float:
    """The most memory that making a shard takes, in shards."""
    with measured() as found:
        shard = made(region)
    return found.beyond / shard.nbytes


def differing() -> list[str]:
    """Shardings, dtypes and variants whose bits are not those that torch makes of the whole tensor."""
    shape, found = (384, 3000), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with use_kernels(TORCH):
            full = made(Region.whole(shape), dtype)
        for variant in (*list_variants(), TORCH):
            with use_kernels(variant):
                for name, regions in cuts(shape, 4).items():
                    if not all(torch.equal(made(region, dtype), region.take(full)) for region in regions):
                        found.append(f"{variant} {dtype} {name}")
    return found


def main() -> int:
    torch.set_num_threads(1)
    shards = {name: regions[NUM_RANKS // 2] for name, regions in cuts(SHAPE, NUM_RANKS).items()}
    runs = {name: (lambda _, region=region: made(region)) for name, region in shards.items()}
    numel = SHAPE[0] * SHAPE[1] // NUM_RANKS
    speeds = ratios({"randn": lambda _: torch.randn(numel), **runs}, "randn", NUM_ROUNDS)
    peaks = {name: peak(region) for name, region in shards.items()}
    wrong = differing()
    for name in shards:
        print(f"{name:>8}: {speeds[name]:.2f} times torch.randn, peak {peaks[name]:.2f} shards")
    slowest, most = min(speeds[name] for name in shards), max(peaks.values())
    print(
        f"generate: {slowest:.2f} times torch.randn (bar {SPEED}), peak memory {most:.2f} shards (bar {MEMORY}), "
        f"{'bits differ: ' + ', '.join(wrong) if wrong else 'the same bits for every sharding and variant'}"
    )
    return int(slowest < SPEED or most > MEMORY or bool(wrong))
