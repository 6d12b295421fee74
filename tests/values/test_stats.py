"""The measure of difference: right in every dtype and at every scale, and a sum over parts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernel_variants import EVERY
from ttrace.layouts.region import Region
from ttrace.values.chunks import cut_chunks
from ttrace.values.generate import Normal, generate_values
from ttrace.values.kernels.choice import choose_kernels, use_kernels
from ttrace.values.stats import Stats, has_few_values, measure_difference, measure_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True, params=EVERY)
def each_variant(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here holds for torch and for each variant of the kernels that this machine has."""
    with use_kernels(request.param):
        yield


def pair(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and one that differs from it by about a tenth."""
    whole = Region.whole(shape)
    a = generate_values("a", whole, dtype=torch.float32, distribution=Normal(0.1)) * scale
    b = a + generate_values("b", whole, dtype=torch.float32, distribution=Normal(0.0, 0.1)) * scale
    return a.to(dtype), b.to(dtype)


def check_against_oracle(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> None:
    """Everything again, the plain way."""
    x, y = a.double(), b.double() * factor
    found = measure_difference(a, b, factor=factor)
    # Kernels sum blocks of two bf16 tensors in float32.
    rel = 1e-6 if a.dtype == b.dtype == torch.bfloat16 and choose_kernels() else 1e-12
    assert found.count == a.numel()
    assert found.error == pytest.approx(float((x - y).norm() / x.norm()), rel=rel)
    assert found.scale == pytest.approx(float((x * y).sum() / (x * x).sum()), rel=rel)
    assert found.norm == pytest.approx(float(x.norm()), rel=rel)
    assert found.max_diff == float((x - y).abs().max())
    assert found.max_at is not None
    assert found.max_diff == float((x - y).abs()[found.max_at])
    assert (found.nan_a, found.inf_a, found.nan_b, found.inf_b) == (0, 0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (33, 65), (1, 3, 5, 2), (1000, 700), (1, 700_000), (3, 1, 300_000)], ids=str)
def test_measures_are_those_of_a_double_precision_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_against_oracle(*pair(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e37, 1e30, 1e19, 1e-12, 1e-19, 1e-30, 1e-38])
def test_measures_hold_at_extreme_scales(scale: float, dtype: torch.dtype) -> None:
    """In float32 the squares would be infinite or zero."""
    check_against_oracle(*pair((100, 100), dtype, scale))


def test_blocks_of_one_tensor_may_have_any_scale() -> None:
    a, b = pair((40, 4096), torch.bfloat16)
    scales = torch.logspace(-37, 37, 40)[:, None].bfloat16()
    a, b = a * scales, b * scales
    for lot in (slice(None), slice(20), slice(10)):
        check_against_oracle(a[lot], b[lot])
    zero = torch.zeros_like(a)
    assert measure_difference(zero, a).bb == pytest.approx(float(a.double().square().sum()), rel=1e-6)
    assert measure_difference(zero, zero) == Stats(count=a.numel())


def test_a_tiny_difference_of_large_tensors_is_seen() -> None:
    a = torch.full((1000, 1000), 1e4)
    b = a.clone()
    b[777, 3] = torch.nextafter(a[777, 3], torch.tensor(math.inf))
    found = measure_difference(a, b)
    assert found.max_at == (777, 3)
    assert found.error == pytest.approx(float(b[777, 3].double() - 1e4) / 1e4 / 1000, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_strided_transposed_and_expanded_views_are_read_in_place(dtype: torch.dtype) -> None:
    a, b = pair((600, 900), dtype)
    check_against_oracle(a.T, b.T)
    check_against_oracle(a.T, b.T.contiguous())
    check_against_oracle(a[3::7, ::2], b[3::7, ::2])
    check_against_oracle(a[:, None, :5].expand(-1, 4, -1), b[:, None, :5].expand(-1, 4, -1))


@pytest.mark.parametrize("b_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
def test_every_pair_of_dtypes_can_be_measured(a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    a, b = pair((37, 131))
    check_against_oracle(a.to(a_dtype), b.to(b_dtype))
    check_against_oracle(a.to(a_dtype)[:, 3:70], b.to(b_dtype)[:, 3:70])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_every_number_of_a_small_dtype_is_read_right(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    a = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    found, x = measure_difference(a, torch.zeros(a.shape)), a.double()
    assert (found.nan_a, found.inf_a) == (int(x.isnan().sum()), int(x.isinf().sum()))
    assert found.aa == pytest.approx(float(x[x.isfinite()].square().sum()), rel=1e-12)
    for one in torch.randint(len(a), (50,), generator=torch.Generator().manual_seed(0)):
        if x[one].isfinite():
            assert measure_difference(a[one], torch.zeros(())).max_diff == float(x[one].abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 64, 1000, 1024, 5000])
def test_rows_of_any_length_are_read_in_place(columns: int, dtype: torch.dtype) -> None:
    a, b = pair((30_000 // columns + 2, columns + 7), dtype)
    check_against_oracle(a[:, 5 : 5 + columns], b[:, 7 : 7 + columns])
    check_against_oracle(a[:, 5 : 5 + columns].contiguous(), b[:, 5 : 5 + columns])
    check_against_oracle(a[1:, :columns].unflatten(0, (-1, 1))[::2], b[1:, :columns].unflatten(0, (-1, 1))[::2])


def test_views_of_many_dims_are_read_in_place() -> None:
    a, b = pair((6, 5, 7, 4, 9))
    check_against_oracle(a[1:5, ::2, 1:, :, 2:8], b[1:5, ::2, 1:, :, 2:8])
    check_against_oracle(a.permute(3, 0, 4, 2, 1), b.permute(3, 0, 4, 2, 1))
    check_against_oracle(a.permute(3, 0, 4, 2, 1)[:, 1:], b.permute(3, 0, 4, 2, 1).contiguous()[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", ["whole", "columns", "transposed"])
def test_threads_find_what_one_thread_finds(view: str, dtype: torch.dtype) -> None:
    a, b = pair((1300, 1100), dtype)
    a, b = {"whole": (a, b), "columns": (a[:, 1:], b[:, 1:]), "transposed": (a.T, b.T)}[view]
    b[777, 77] = 100.0
    one, two = measure_difference(a, b), measure_difference(a, b, num_threads=2)
    assert (two.count, two.max_diff, two.max_at) == (one.count, one.max_diff, (777, 77))
    assert [two.aa, two.bb, two.dd, two.ab] == pytest.approx([one.aa, one.bb, one.dd, one.ab], rel=1e-6)


def test_measuring_changes_neither_tensor() -> None:
    a, b = pair((300, 10), torch.float64)
    kept = a.clone(), b.clone()
    measure_difference(a, b, factor=0.5)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


def test_a_scalar_is_a_tensor_like_others() -> None:
    found = measure_difference(torch.tensor(2.0), torch.tensor(3.0))
    assert (found.count, found.error, found.scale, found.max_diff, found.max_at) == (1, 0.5, 1.5, 1.0, ())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
def test_empty_tensors_are_equal(shape: tuple[int, ...]) -> None:
    found = measure_difference(torch.empty(shape), torch.empty(shape))
    assert found == Stats()
    assert found.error == 0.0


def test_equal_tensors_have_no_difference_and_no_place_of_it() -> None:
    a, _ = pair((50, 50))
    found = measure_difference(a, a.clone())
    assert (found.error, found.scale, found.max_diff, found.max_at) == (0.0, 1.0, 0.0, None)


def test_integers_and_masks_are_measured_too() -> None:
    assert measure_difference(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 5])).max_diff == 2.0
    assert measure_difference(torch.tensor([True, False]), torch.tensor([True, True])).max_at == (1,)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot compare shapes \(2, 3\) and \(3, 2\)"):
        measure_difference(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_nan_and_inf_are_counted_and_make_the_error_infinite(dtype: torch.dtype) -> None:
    a, b = pair((40, 50), dtype)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, math.inf, -math.inf
    b[0, 0], b[1, 1], b[39, 49] = math.nan, math.inf, math.nan
    found = measure_difference(a, b)
    assert (found.nan_a, found.inf_a, found.nan_b, found.inf_b) == (1, 2, 2, 1)
    assert found.count == 2000
    assert found.error == math.inf
    assert (found.finite_a, found.finite_b) == (False, False)
    good = a.isfinite() & b.isfinite()
    x, y = a[good].double(), b[good].double()
    assert found.dd == pytest.approx(float(((x - y) ** 2).sum()), rel=1e-12)
    assert found.max_diff == float((x - y).abs().max())


def test_nan_on_one_side_only_says_which() -> None:
    a, b = pair((10, 10))
    b[3, 4] = math.nan
    found = measure_difference(a, b)
    assert (found.finite_a, found.finite_b, found.error) == (True, False, math.inf)


def test_nan_in_float8_is_seen() -> None:
    a, b = pair((10, 10), torch.float8_e4m3fn)
    b.view(torch.uint8)[2, 2] = 0x7F
    assert measure_difference(a, b).nan_b == 1


def test_squares_beyond_double_precision_make_the_error_infinite_not_nan() -> None:
    """A nan would compare as "no larger than the tolerance"."""
    a = torch.full((10,), 1e200, dtype=torch.float64)
    found = measure_difference(a, 2 * a)
    assert found.error == math.inf
    assert (found.finite_a, found.finite_b) == (True, True)


def test_a_zero_reference_equals_only_zero() -> None:
    zero, other = torch.zeros(5), torch.tensor([0.0, 0.0, 1e-30, 0.0, 0.0])
    assert measure_difference(zero, zero).error == 0.0
    assert measure_difference(zero, other).error == math.inf
    assert measure_difference(zero, other).max_at == (2,)
    assert measure_difference(other, zero).error == 1.0
    assert math.isnan(measure_difference(zero, other).scale)
    assert measure_difference(other, zero).scale == 0.0


@pytest.mark.parametrize("factor", [0.5, 1 / 3, -1.0, 1024.0])
def test_the_factor_is_applied_to_b(factor: float) -> None:
    a, b = pair((64, 64))
    check_against_oracle(a, b, factor)
    assert measure_difference(a, (a.double() / factor), factor=factor).error < 1e-15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (33, 65), (3, 300_000)], ids=str)
def test_sums_of_tensors_are_measured_like_the_tensors_they_add_up_to(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    before, after = pair(shape, dtype)
    other = after.roll(1)
    xs, ys = [(1.0, after), (-1.0, before)], [(0.5, other), (0.5, before.double()), (2.0, after)]
    x, y = after.double() - before.double(), 0.5 * other.double() + 0.5 * before.double() + 2.0 * after.double()
    assert measure_sums(xs, ys) == measure_difference(x, y)
    assert measure_sums(xs, ys[:1]) == measure_difference(x, other, factor=0.5)


def test_a_small_difference_of_large_numbers_keeps_all_its_digits() -> None:
    before = torch.full((5000,), 1e8)
    after = torch.nextafter(before, before * 2)
    assert measure_sums([(1.0, after), (-1.0, before)], [(1.0, torch.full((5000,), 8.0))]).error == 0.0


def test_columns_of_several_tensors_add_up_where_they_lie() -> None:
    a, b = pair((64, 300))
    parts = [(1.0, a.T[17:200]), (1.0, b.T[17:200])]
    whole = (a.double() + b.double()).T[17:200]
    assert measure_sums(parts, [(1.0, whole)]).error == 0.0
    assert measure_sums(parts, [(1.0, a.T[17:200])]).max_at == measure_difference(whole, a.T[17:200]).max_at


def test_scale_is_the_factor_between_the_two() -> None:
    a, _ = pair((64, 64))
    assert measure_difference(a, 2 * a).scale == 2.0
    assert measure_difference(a, 2 * a).error == 1.0


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Two matrices, now and then with values that are not finite, and the sizes of parts of their rows."""
    sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    columns = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    a = torch.randn(sum(sizes), columns, generator=generator)
    b = a + 0.1 * torch.randn(sum(sizes), columns, generator=generator)
    for tensor in (a, b):
        for at in draw(st.lists(st.integers(0, max(a.numel() - 1, 0)), max_size=2)) if a.numel() else []:
            tensor.view(-1)[at] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30]))
    return a, b, sizes


@given(case=partitioned())
@settings(max_examples=200, deadline=None)
def test_stats_of_parts_add_up_to_stats_of_the_whole(case: tuple[torch.Tensor, torch.Tensor, list[int]]) -> None:
    a, b, sizes = case
    whole, total = measure_difference(a, b), Stats()
    for x, y in zip(a.split(sizes), b.split(sizes), strict=True):
        total = total + measure_difference(x, y)
    for name in ("count", "nan_a", "inf_a", "nan_b", "inf_b", "max_diff"):
        assert getattr(total, name) == getattr(whole, name)
    for name in ("aa", "bb", "dd", "ab"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    assert (total.max_at is None) == (whole.max_at is None)


def test_the_larger_difference_keeps_its_place_in_a_sum() -> None:
    small, large = Stats(count=1, max_diff=1.0, max_at=(7,)), Stats(count=1, max_diff=2.0, max_at=(9,))
    assert (small + large).max_at == (large + small).max_at == (9,)
    assert (Stats() + small).max_at == (7,)


@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), size=st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_chunks_are_small_and_come_in_row_major_order(shape: tuple[int, ...], size: int) -> None:
    full = torch.arange(math.prod(shape)).view(shape)
    parts = [full[tuple(slice(*run) for run in cut)] for cut in cut_chunks(shape, size)]
    assert all(0 < part.numel() <= size for part in parts)
    joined = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
    assert joined.tolist() == list(range(full.numel()))


def test_masks_have_few_values_and_measurements_and_constants_do_not() -> None:
    mask = torch.arange(16)[None] < torch.arange(1, 9)[:, None]
    lowest = torch.finfo(torch.float32).min
    for dtype in (torch.float32, torch.bfloat16):
        assert has_few_values(mask.to(dtype))
    for masked in (-1e9, lowest, -math.inf):
        assert has_few_values(torch.zeros(8, 16).masked_fill(~mask, masked))
    assert not has_few_values(mask.long()), "integers are measured in other ways"
    assert not has_few_values(mask[:3].float()), "too few numbers"
    assert not has_few_values(mask.to(torch.float8_e4m3fn)), "torch cannot sort them"
    assert not has_few_values(mask.float().to_sparse())
    assert not has_few_values(torch.ones(8, 16))
    noise, _ = pair((8, 16), torch.bfloat16)
    assert not has_few_values(noise)
    rare = torch.zeros(8, 1024)
    rare[0, 1::8] = noise.float().view(-1)
    assert not has_few_values(rare), "values that a sample of every second number does not have"
