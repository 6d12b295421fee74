"""Comparison of two tensors, compared with the usual line of torch for it.

Speed and accuracy are measured; the exact result is the same line in float64.
"""

from __future__ import annotations

import math

import torch

from bench._ratios import ratios
from ttrace.values.chunks import cut_chunks
from ttrace.values.stats import measure_difference

BARS = {torch.bfloat16: 20.0, torch.float32: 2.5}
"""Times faster."""
ERROR = 1e-6
NUM_ELEMENTS, NUM_SLICES, NUM_ROUNDS = 1 << 24, 6, 7
CASES = [
    (dtype, scale, numel)
    for dtype in (torch.float32, torch.bfloat16)
    for scale, numel in ((1.0, 1 << 20), (1e30, 1 << 20), (1e-30, 1 << 20), (1e37, 1 << 20), (1e-37, 1 << 20))
] + [(torch.float32, 1.0, 10**8), (torch.bfloat16, 1.0, 10**8)]
"""Where the error must be right: dtype, scale and number of elements."""


def naive(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / a.float().norm())


def true(a: torch.Tensor, b: torch.Tensor) -> float:
    dd = aa = 0.0
    for ((start, stop),) in cut_chunks((a.numel(),)):
        x, y = a[start:stop].double(), b[start:stop].double()
        dd, aa = dd + float((x - y).square().sum()), aa + float(x.square().sum())
    return math.sqrt(dd / aa)


def pair(dtype: torch.dtype, scale: float, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values around one, of which every thousandth differs: in float32, later ones hardly move a long sum."""
    a = torch.rand(numel).add_(1)
    b = a.clone()
    b[::1000] *= 1 + (1e-5 if dtype == torch.float32 else 1e-2)
    return a.mul_(scale / 2).to(dtype), b.mul_(scale / 2).to(dtype)


def speed(dtype: torch.dtype) -> float:
    a = torch.randn(NUM_SLICES, NUM_ELEMENTS)
    b = (a * (1 + torch.randn(NUM_ELEMENTS) / 256)).to(dtype)
    a = a.to(dtype)
    runs = {
        "naive": lambda turn: naive(a[turn % NUM_SLICES], b[turn % NUM_SLICES]),
        "ours": lambda turn: measure_difference(a[turn % NUM_SLICES], b[turn % NUM_SLICES]),
    }
    return ratios(runs, "naive", NUM_ROUNDS)["ours"]


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    worst = 0.0
    for dtype, scale, numel in CASES:
        a, b = pair(dtype, scale, numel)
        error = true(a, b)
        ours, theirs = abs(measure_difference(a, b).error / error - 1), abs(naive(a, b) / error - 1)
        worst = max(worst, ours)
        print(f"{dtype!s:>15} scale {scale:g}, {numel:g} elements: off by {ours:.0e}, naive torch by {theirs:.0e}")
    found = {dtype: speed(dtype) for dtype in BARS}
    speeds = ", ".join(
        f"{ratio:.1f} times naive torch in {dtype} (bar {BARS[dtype]})" for dtype, ratio in found.items()
    )
    print(f"compare-naive: {speeds}; errors off by at most {worst:.0e} (bar {ERROR})")
    return int(any(ratio < BARS[dtype] for dtype, ratio in found.items()) or not worst <= ERROR)
