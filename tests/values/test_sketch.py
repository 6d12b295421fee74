"""Sketches: sums over shards, the same from torch and from kernels, that tell norms whatever the error looks like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernel_variants import EVERY
from tests.support.words import word
from ttrace.layouts import ranges as rg
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region
from ttrace.values.kernels.choice import TORCH, use_kernels
from ttrace.values.sketch import compute_sketch, estimate_uncertainty

SHAPE = (70, 4000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True, params=EVERY)
def each_variant(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_kernels(request.param):
        yield


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(full: torch.Tensor, k: int) -> torch.Tensor:
    """A sketch by its definition, one element at a time, in Python's own integers."""
    sums = [0.0] * k
    for i, x in enumerate(full.double().flatten().tolist()):
        sign = -1 if word("sketch", i // 64) >> i % 64 & 1 else 1
        turn = (word("sketch", (1 << 62) + i // k) >> 32) * k >> 32
        sums[(i + turn) % k] += sign * x
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sketch_is_what_its_definition_says(dtype: torch.dtype) -> None:
    full = numbers((7, 293), dtype)
    found = compute_sketch(full, Region.whole(full.shape), 128)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, plain(full, 128), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_and_kernels_agree(dtype: torch.dtype) -> None:
    full = numbers(SHAPE, dtype)
    here = compute_sketch(full, Region.whole(SHAPE))
    with use_kernels(TORCH):
        torch.testing.assert_close(here, compute_sketch(full, Region.whole(SHAPE)), rtol=0, atol=1e-12)


CUTS = [
    [Region(SHAPE, (((0, 31),), ((0, 4000),))), Region(SHAPE, (((31, 70),), ((0, 4000),)))],
    [Region(SHAPE, (((0, 70),), ((0, 1000), (3000, 4000)))), Region(SHAPE, (((0, 70),), ((1000, 3000),)))],
    [Region(SHAPE, (((0, 70),), ((n, n + 100),))) for n in range(0, 4000, 100)],
    [Region.flat_of(SHAPE, ((0, 77_777),)), Region.flat_of(SHAPE, ((100_000, 280_000), (77_777, 100_000)))],
    [
        Region(SHAPE, (((5, 70), (0, 5)), ((0, 3),))),
        Region(SHAPE, (((0, 70),), ((3, 4000),)), ((0, 100_001),)),
        Region(SHAPE, (((0, 70),), ((3, 4000),)), ((100_001, 279_790),)),
    ],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("regions", CUTS, ids=["rows", "zigzag", "columns", "flat", "mixed"])
def test_sketches_of_shards_add_up(regions: list[Region], dtype: torch.dtype) -> None:
    full = numbers(SHAPE, dtype)
    whole = compute_sketch(full, Region.whole(SHAPE))
    parts = sum(compute_sketch(region.take(full), region) for region in regions)
    assert isinstance(parts, torch.Tensor)
    # Of bf16 numbers every sum is exact.
    torch.testing.assert_close(parts, whole, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-12)


def test_shards_are_read_where_they_lie() -> None:
    full = numbers((20, 30, 40))
    region = Region((20, 30, 40), (((3, 9),), ((5, 30),), ((7, 39),)))
    view = full[3:9, 5:30, 7:39]
    assert torch.equal(compute_sketch(view, region), compute_sketch(view.contiguous(), region))
    assert torch.equal(
        compute_sketch(full.mT.contiguous().mT, Region.whole(full.shape)),
        compute_sketch(full, Region.whole(full.shape)),
    )


def test_scalars_and_empty_tensors_have_sketches() -> None:
    assert compute_sketch(torch.tensor(3.0), Region.whole(()), 64).abs().sum() == 3.0
    for shape in ((0,), (3, 0), (0, 5)):
        assert torch.equal(
            compute_sketch(torch.empty(shape), Region.whole(shape), 64), torch.zeros(64, dtype=torch.float64)
        )
    nothing = Region((3, 5), ((), ((0, 5),)))
    assert not compute_sketch(torch.empty(0, 5), nothing, 64).any()


def test_numbers_that_are_not_finite_stay_visible() -> None:
    full = numbers((100, 100))
    full[3, 4], full[50, 60] = math.nan, math.inf
    assert 1 <= int((~compute_sketch(full, Region.whole(full.shape)).isfinite()).sum()) <= 2


def test_sums_do_not_overflow() -> None:
    full = torch.full((1 << 16,), 3e38, dtype=torch.bfloat16)
    assert compute_sketch(full, Region.whole(full.shape), 64).isfinite().all()


@pytest.mark.parametrize("k", [0, 100, -64])
def test_other_numbers_of_buckets_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 64 buckets, not {k}"):
        compute_sketch(torch.zeros(3), Region.whole((3,)), k)


def test_a_tensor_that_does_not_fit_its_region_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) does not hold a region of \(4,\)"):
        compute_sketch(torch.zeros(3), Region.whole((4,)))


def wrong(kind: str, seed: int) -> torch.Tensor:
    """An error of 128 x 512 numbers: everywhere, or only in one place."""
    error, noise = torch.zeros(128, 512), numbers((128, 512), seed=seed)
    where = {"all": (), "column": (slice(None), 7), "row": (33,), "chunk": (slice(32, 48), slice(128, 160))}[kind]
    error[where] = noise[where]
    return error


@pytest.mark.parametrize("kind", ["all", "column", "row", "chunk"])
def test_norms_are_told_as_well_as_promised(kind: str) -> None:
    """Over 200 seeds; a standard deviation of as many samples is itself uncertain by 5%."""
    k = 64
    ratios = []
    for seed in range(200):
        error = wrong(kind, seed)
        told = float(compute_sketch(error, Region.whole(error.shape), k, seed=seed).norm())
        ratios.append(told / float(error.double().norm()))
    found = torch.tensor(ratios)
    assert float(found.std()) < 1.2 * estimate_uncertainty(k)
    assert abs(float(found.square().mean()) - 1) < 3 * 2 * estimate_uncertainty(k) / math.sqrt(200)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Ranges]]:
    """A shape and, per dim, ranges of it in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    dims = []
    for size in shape:
        bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        runs = draw(st.permutations(list(pairwise(bounds))))
        dims.append(rg.merge(runs[: draw(st.integers(1, len(runs)))]))
    return shape, dims


@given(case=cuts())
@settings(max_examples=100, deadline=None)
def test_any_region_is_sketched_as_if_the_rest_were_zero(case: tuple[tuple[int, ...], list[Ranges]]) -> None:
    shape, dims = case
    region, full = Region(shape, tuple(dims)), numbers(shape, torch.bfloat16)
    rest = torch.zeros(shape, dtype=torch.bfloat16)
    region.put(region.take(full), rest)
    assert torch.equal(compute_sketch(region.take(full), region, 64), compute_sketch(rest, Region.whole(shape), 64))
