"""Time of comparing two tensors, relative to reading them once and doing nothing else."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from bench._ratios import ratios
from ttrace.values.kernels.choice import choose_kernels, list_variants, use_kernels
from ttrace.values.kernels.library import Kernels
from ttrace.values.stats import measure_difference

BARS = {
    ("avx512", torch.bfloat16, 1): 0.80,
    ("avx512", torch.bfloat16, 2): 0.80,
    ("avx512", torch.float32, 1): 0.80,
    ("avx512", torch.float32, 2): 0.80,
    ("avx2", torch.bfloat16, 1): 0.70,
    ("avx2", torch.float32, 1): 0.90,
}
"""By variant, dtype and number of threads: the least share of the read limit."""
NUM_BYTES, SLICE, NUM_ROUNDS = 1 << 29, 1 << 25, 25
"""Of each tensor, and of the slice of it that one call works on: whatever was read last has left the caches."""


def read(found: Kernels, a: torch.Tensor, b: torch.Tensor) -> None:
    found.read(ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), ctypes.c_int64(a.nbytes))


def shares(dtype: torch.dtype, num_threads: int, pool: ThreadPoolExecutor) -> dict[str, float]:
    """By variant, the share of the read limit: that of the variant that reads fastest."""
    a = torch.randn(SLICE // dtype.itemsize)
    b = (a * (1 + torch.randn(a.shape) / 256)).to(dtype).repeat(NUM_BYTES // SLICE).view(-1, a.numel())
    a = a.to(dtype).repeat(NUM_BYTES // SLICE).view(-1, b.shape[1])

    def limit(turn: int, found: Kernels) -> None:
        halves = (tensor[turn % len(a)].tensor_split(num_threads) for tensor in (a, b))
        list(pool.map(lambda pair: read(found, *pair), list(zip(*halves, strict=True))))

    def measure(turn: int, variant: str) -> None:
        with use_kernels(variant):
            measure_difference(a[turn % len(a)], b[turn % len(a)], num_threads=num_threads)

    runs = {}
    for variant in list_variants():
        with use_kernels(variant):
            chosen = choose_kernels()
        assert chosen is not None
        runs[f"read {variant}"] = lambda turn, found=chosen: limit(turn, found)
        runs[variant] = lambda turn, variant=variant: measure(turn, variant)
    found = ratios(runs, f"read {list_variants()[0]}", NUM_ROUNDS)
    best = max(found[name] for name in found if name.startswith("read"))
    return {variant: found[variant] / best for variant in list_variants()}


def main() -> int:
    if not list_variants():
        print("compare: there are no kernels here; `python hatch_build.py` builds them")
        return 1
    torch.set_num_threads(1)
    missed = []
    with ThreadPoolExecutor(2) as pool:
        for dtype, num_threads in product((torch.bfloat16, torch.float32), (1, 2)):
            for variant, share in shares(dtype, num_threads, pool).items():
                bar = BARS.get((variant, dtype, num_threads))
                asked = f" (bar {bar})" if bar else ""
                print(f"{variant:>7} {dtype!s:>15} {num_threads} threads: {share:.2f} of the read limit{asked}")
                if bar and share < bar:
                    missed.append(f"{variant} {dtype} {num_threads} threads {share:.2f} < {bar}")
    print(f"compare: {'; '.join(missed) or 'every bar of the variants that this machine has is reached'}")
    return int(bool(missed))
