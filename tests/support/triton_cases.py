"""Kernels in Triton, run by its interpreter and compared with those in C; `tests/values/test_triton.py` starts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch

from ttrace.layouts.region import Region
from ttrace.values import generate, sketch
from ttrace.values.generate import Normal, Signed, generate_values
from ttrace.values.kernels import choice, triton_kernels
from ttrace.values.sketch import compute_sketch
from ttrace.values.words import WordStream

Result = TypeVar("Result")

REGIONS = {
    "whole": Region.whole((3, 700)),
    "a scalar": Region.whole(()),
    "nothing": Region((4, 8), (((0, 0),), ((0, 8),))),
    "rows": Region((8, 300), (((2, 5),), ((0, 300),))),
    "columns": Region((6, 2048), (((0, 6),), ((512, 1536),))),
    "two ranges": Region((16, 64), (((0, 4), (12, 16)), ((0, 64),))),
    "a box of a box": Region((4, 6, 1200), (((1, 3),), ((2, 5),), ((100, 900),))),
    "a part of a flattened tensor": Region((8, 300), (((0, 8),), ((0, 300),)), ((450, 1301),)),
}
LEFT_TO_TORCH = {"short rows": Region((40, 128), (((0, 40),), ((32, 64),)))}
"""Of which a sketch is not computed by these kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
K = 256


def on_triton(function: Callable[..., Result], *args: Any, **named: Any) -> tuple[Result, int]:
    """Call a function as if the host were an accelerator, and count the calls that Triton took."""
    with (
        mock.patch.object(choice, "TRITON_DEVICES", ("cpu",)),
        mock.patch.object(generate, "choose_kernels", return_value=None),
        mock.patch.object(sketch, "choose_kernels", return_value=None),
        mock.patch.object(triton_kernels, "fill", wraps=triton_kernels.fill) as fill,
        mock.patch.object(triton_kernels, "compute_sums", wraps=triton_kernels.compute_sums) as compute_sums,
    ):
        return function(*args, **named), fill.call_count + compute_sums.call_count


def check_values(region: Region, dtype: torch.dtype) -> None:
    for distribution in (Normal(0.5, 3.0), Signed(0.1)):
        expected = generate_values("w", region, dtype=dtype, distribution=distribution, seed=3)
        found, num_calls = on_triton(generate_values, "w", region, dtype=dtype, distribution=distribution, seed=3)
        assert torch.equal(found, expected)
        assert num_calls == 1


def check_sketch(region: Region, dtype: torch.dtype, *, is_left: bool = False) -> None:
    local = generate_values("x", region, dtype=dtype, distribution=Normal(0.0, 2.0))
    expected = compute_sketch(local, region, K)
    found, num_calls = on_triton(compute_sketch, local, region, K)
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    assert torch.equal(found, on_triton(compute_sketch, local, region, K)[0])
    assert num_calls == 1
    assert (triton_kernels.compute_sums(local, region, WordStream.of("w"), K) is None) == is_left


def main() -> None:
    on_triton(choice.choose_device_kernels, torch.empty(1))  # which tries them once
    assert triton_kernels.works_on(torch.device("cpu"))
    with mock.patch.object(triton_kernels, "KNOWN_SUM", 1.0):
        assert not triton_kernels.works_on(torch.device("cpu"))
    for name, region in {**REGIONS, **LEFT_TO_TORCH}.items():
        for dtype in DTYPES:
            print(name, dtype, flush=True)
            check_values(region, dtype)
            check_sketch(region, dtype, is_left=name in LEFT_TO_TORCH)
    gaps = torch.randn(700, 3).t()
    expected, (found, _) = (
        compute_sketch(gaps, REGIONS["whole"], K),
        on_triton(compute_sketch, gaps, REGIONS["whole"], K),
    )
    assert (found - expected).norm() <= 1e-12 * expected.norm()


if __name__ == "__main__":
    main()
