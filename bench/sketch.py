"""Cost of a sketch relative to a copy of the tensor, and accuracy of the error that it estimates.

The error is everywhere in a matrix, or only in one column, one row or one chunk of it.
"""

from __future__ import annotations

import math
import statistics

import torch

from bench._ratios import ratios
from ttrace.layouts.region import Region
from ttrace.values.kernels.choice import list_variants, use_kernels
from ttrace.values.sketch import compute_sketch, estimate_uncertainty

COST, SPREAD = 0.8, 1.2
"""The bars: the time of a clone; the standard deviation of estimated / true in units of 1 / sqrt(2 k)."""
NUM_ELEMENTS, NUM_SLICES, NUM_ROUNDS = 1 << 24, 6, 11
SHAPE = (512, 4096)
ERRORS = {"all": (), "column": (slice(None), 7), "row": (300,), "chunk": (slice(128, 192), slice(1024, 1280))}
KS, NUM_SEEDS = (256, 1024), 200


def costs(dtype: torch.dtype) -> dict[str, float]:
    """By variant, the time of a sketch over that of a clone."""
    tensors = torch.randn(NUM_SLICES, NUM_ELEMENTS).to(dtype)
    whole = Region.whole((NUM_ELEMENTS,))

    def sketched(turn: int, variant: str) -> None:
        with use_kernels(variant):
            compute_sketch(tensors[turn % NUM_SLICES], whole)

    runs = {variant: (lambda turn, variant=variant: sketched(turn, variant)) for variant in list_variants()}
    found = ratios({"clone": lambda turn: tensors[turn % NUM_SLICES].clone(), **runs}, "clone", NUM_ROUNDS)
    return {variant: 1 / found[variant] for variant in list_variants()}


def spread(kind: str, k: int) -> tuple[float, float]:
    """Return mean and standard deviation, over seeds, of the estimated error relative to the true one."""
    error = torch.zeros(SHAPE)
    error[ERRORS[kind]] = torch.randn(SHAPE)[ERRORS[kind]]
    true = float(error.double().norm())
    whole = Region.whole(SHAPE)
    estimates = [float(compute_sketch(error, whole, k, seed=i).norm()) / true for i in range(NUM_SEEDS)]
    return statistics.mean(estimates), statistics.stdev(estimates)


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {dtype: costs(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, by_variant in found.items():
        print(
            f"{dtype!s:>15}:", ", ".join(f"{variant} {cost:.2f}" for variant, cost in by_variant.items()), "of a clone"
        )
    worst = 0.0
    for k in KS:
        for kind in ERRORS:
            mean, std = spread(kind, k)
            expected = estimate_uncertainty(k)
            worst = max(worst, std / expected)
            print(f"k={k} wrong {kind:>6}: estimated / true {mean:.3f} +- {std:.4f}, expected {expected:.4f}")
    cost = max((by_variant.get("avx512", math.inf) for by_variant in found.values()), default=math.inf)
    print(f"sketch: {cost:.2f} of a clone on AVX-512 (bar {COST}), spread {worst:.2f} / sqrt(2 k) (bar {SPREAD})")
    return int(cost > COST or worst > SPREAD)
