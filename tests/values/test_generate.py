"""Generated values: the bits every implementation must make, and that they are random enough to reveal mistakes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from tests.support.kernel_variants import EACH_VARIANT
from tests.support.words import NAME, OTHERS, word
from ttrace.layouts import ranges as rg
from ttrace.layouts.region import Region
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows, Signed, generate_values
from ttrace.values.kernels.choice import TORCH, use_kernels
from ttrace.values.words import WordStream

FAR = Region((1 << 45,), ((((1 << 44) + 3, (1 << 44) + 9),),))
"""Six elements of a tensor of 2^45, from the middle: here an index kept in 32 bits would show."""


def made(
    region: Region, distribution: Distribution, dtype: torch.dtype = torch.float32, name: str = NAME, seed: int = 0
) -> torch.Tensor:
    return generate_values(name, region, dtype=dtype, distribution=distribution, seed=seed)


def normals(index: torch.Tensor, name: str) -> torch.Tensor:
    """The values that a very large tensor of this name has at these indices."""
    return made(Region((1 << 62,), (rg.from_indices(index),)), Normal(), name=name).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


GOLDEN: Sequence[tuple[Region, Distribution, torch.dtype, list[str] | list[int] | list[bool]]] = [
    (
        Region.whole((3, 5)),
        Normal(),
        torch.float32,
        ["0x1.9c78bep-2", "-0x1.0ed288p+0", "-0x1.2c1074p-1", "-0x1.2920bep-1", "0x1.21af7cp-2", "0x1.2fc226p-3"],
    ),
    (
        Region.whole((3, 5)),
        Normal(0.5, 0.02),
        torch.float32,
        ["0x1.041feep-1", "0x1.ea558ep-2", "0x1.f3ff58p-2", "0x1.f41d68p-2", "0x1.02e598p-1", "0x1.0184d0p-1"],
    ),
    (
        Region.whole((3, 5)),
        Normal(),
        torch.bfloat16,
        ["0x1.9cp-2", "-0x1.0ep+0", "-0x1.2cp-1", "-0x1.2ap-1", "0x1.22p-2", "0x1.30p-3"],
    ),
    (Region.whole((3, 5)), Integers(0, 50257), torch.int64, [46180, 33545, 38359, 1258, 8994, 14148]),
    (Region.whole((3, 5)), Integers(-3, 1000, keep=0.5), torch.int64, [918, 666, 762, -100, -100, -100, 964, 147]),
    (Region.whole((3, 5)), Rows(50257), torch.int64, [0, 33545, 38359, 1258, 50256, 14148]),
    (Region.whole((3, 5)), Mask(0.3), torch.bool, [True, True, True, False, False, False, True, False]),
    (Region.whole((3, 5)), Permutation(), torch.int64, [10, 12, 3, 2, 14, 13, 4, 1]),
    (
        FAR,
        Normal(),
        torch.float32,
        ["-0x1.b4a718p-1", "-0x1.a87cdep-1", "-0x1.19832cp-3", "-0x1.14608ap+0", "-0x1.164ab6p-2", "-0x1.7834f4p-1"],
    ),
    (FAR, Permutation(), torch.int64, [8708477770072, 22299410226287, 23006465268053, 7890402061494]),
]


@EACH_VARIANT
@pytest.mark.parametrize(("region", "distribution", "dtype", "golden"), GOLDEN, ids=str)
def test_values_are_these_bits_for_ever(
    region: Region,
    distribution: Distribution,
    dtype: torch.dtype,
    golden: list[str] | list[int] | list[bool],
    variant: str,
) -> None:
    with use_kernels(variant):
        found = made(region, distribution, dtype)
    assert found.dtype == dtype
    expected = [float.fromhex(value) if isinstance(value, str) else value for value in golden]
    assert found.flatten()[: len(expected)].tolist() == expected


def test_indices_do_not_overflow_anywhere() -> None:
    """Integers over 2^31 values show bits 17 to 47 of each word."""
    index = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 17, 2**61 + 5])
    found = made(Region((1 << 62,), (rg.from_indices(index),)), Integers(0, 1 << 31), torch.int64)
    assert found.tolist() == [word(NAME, i) >> 17 & 0x7FFFFFFF for i in index.tolist()]


REGIONS = [
    Region((70, 4000), (((10, 30),), ((0, 4000),))),
    Region((70, 4000), (((0, 70),), ((2500, 4000), (0, 1500)))),
    Region((70, 4000), (((69, 70), (3, 4)), ((17, 18), (5, 3999)))),
    Region.flat_of((70, 4000), ((12345, 279_000),)),
    Region((70, 4000), (((10, 30),), ((0, 3000),)), ((59_000, 60_000), (7, 8))),
    Region((70, 4000), ((), ((0, 4000),))),
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


@EACH_VARIANT
@pytest.mark.parametrize("distribution", [Normal(), Normal(0.1, 3.0), Signed(), Signed(0.3)], ids=str)
def test_kernels_make_the_bits_that_torch_makes(distribution: Distribution, variant: str) -> None:
    with use_kernels(TORCH):
        full = {dtype: made(Region.whole((70, 4000)), distribution, dtype) for dtype in FLOATS}
    with use_kernels(variant):
        for dtype, region in itertools.product(FLOATS, REGIONS):
            found, expected = made(region, distribution, dtype), region.take(full[dtype])
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(found.view(bits), expected.contiguous().view(bits))


@pytest.mark.parametrize("distribution", [Normal(0.1, 3.0), Integers(0, 99, keep=0.9), Mask(), Permutation()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_any_shard_has_the_bits_of_the_whole(region: Region, distribution: Distribution, dtype: torch.dtype) -> None:
    full = made(Region.whole(region.shape), distribution, dtype)
    assert torch.equal(made(region, distribution, dtype), region.take(full))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 1)], ids=str)
def test_scalars_and_empty_tensors_can_be_made(shape: tuple[int, ...]) -> None:
    assert made(Region.whole(shape), Normal()).shape == shape


def test_reshaping_a_tensor_keeps_its_values() -> None:
    """The index is row-major, so (2, n) and (2 n,) hold the same stream; chunks must not show."""
    shapes = [(600_000,), (1, 600_000), (2, 300_000), (300_000, 2), (2, 300, 1000)]
    first, *others = (made(Region.whole(shape), Normal()).flatten() for shape in shapes)
    assert all(torch.equal(first, other) for other in others)


def test_normal_values_are_nearly_normal() -> None:
    x = made(Region.whole((1000, 1000)), Normal()).double()
    assert abs(float(x.mean())) < 0.003
    assert abs(float(x.std()) - 1.0) < 0.003
    assert abs(float((x**3).mean())) < 0.01
    # Four uniform lanes: 3 - 6 / 5 / 4 instead of the normal's 3.
    assert abs(float((x**4).mean()) - 2.7) < 0.02
    assert 3.0 < float(x.abs().max()) <= 3.47
    assert abs(float((x.abs() < 1.0).double().mean()) - 0.6693) < 0.003


def test_mean_and_std_are_those_asked_for() -> None:
    x = made(Region.whole((1000, 1000)), Normal(mean=-3.0, std=0.02)).double()
    assert abs(float(x.mean()) + 3.0) < 1e-4
    assert abs(float(x.std()) - 0.02) < 1e-4


def test_neighbours_are_uncorrelated() -> None:
    x = made(Region.whole((1 << 20,)), Normal()).double()
    for shift in (1, 2, 3, 64, 1024, 4096, 1 << 17):
        assert abs(correlation(x[:-shift], x[shift:])) < 0.005, shift


@pytest.mark.parametrize("other", OTHERS)
def test_streams_of_different_names_are_uncorrelated(other: str) -> None:
    """Also at shifted indices, and under XOR of the index.

    A 32-bit mix of index XOR key made the streams of two names permutations of one another.
    """
    index = torch.randint(0, 1 << 40, (6_000,), generator=torch.Generator().manual_seed(0))
    keys = [WordStream.of(NAME).key, WordStream.of(other).key]
    mine = normals(index, NAME)
    bounds = 5 / len(index) ** 0.5
    for shift in (0, 1, 2, 1024, 4096, 1 << 20, (keys[0] - keys[1]) & 0xFFFFFFFF, (keys[1] - keys[0]) & 0xFFFFFFFF):
        assert abs(correlation(mine, normals(index + shift, other))) < bounds, f"shift {shift}"
    both = keys[0] ^ keys[1]
    masks = [*(1 << bit for bit in range(0, 41, 4)), both & 0xFFFFFFFF, both >> 32 & 0xFFFFFFFF, both & (1 << 61) - 1]
    for mask in masks:
        assert abs(correlation(mine, normals(index ^ mask, other))) < bounds, f"XOR {mask:#x}"


def test_a_stream_is_no_permutation_of_another() -> None:
    """The flaw's plain symptom: the same numbers in another order."""
    whole = Region.whole((1 << 16,))
    kept = [made(whole, Integers(0, 1 << 31), torch.int64, name=name).unique() for name in (NAME, *OTHERS)]
    counts = torch.cat(kept).unique(return_counts=True)[1]
    assert int((counts > 1).sum()) < 100


def test_the_seed_changes_every_value() -> None:
    whole = Region.whole((1000,))
    for distribution, dtype in ((Normal(), torch.float32), (Integers(0, 1 << 30), torch.int64)):
        same = made(whole, distribution, dtype, seed=0) == made(whole, distribution, dtype, seed=1)
        assert int(same.sum()) <= 1
    mine, other = (made(whole, Permutation(), torch.int64, seed=seed) for seed in (0, 1))
    assert int((mine == other).sum()) < 20


@pytest.mark.parametrize("seed", [0, 1])
def test_permutations_of_all_sizes_are_permutations(seed: int) -> None:
    for size in range(1, 201):
        found = made(Region.whole((size,)), Permutation(), torch.int64, seed=seed)
        assert found.sort().values.tolist() == list(range(size)), size


def test_a_big_permutation_is_a_permutation_and_in_disorder() -> None:
    size = (1 << 18) + 7
    found = made(Region.whole((size,)), Permutation(), torch.int64)
    assert torch.equal(found.sort().values, torch.arange(size))
    assert abs(correlation(found.double(), torch.arange(size).double())) < 0.005
    assert int((found.diff().abs() == 1).sum()) < 50


def test_integers_stay_in_range_and_reach_all_of_it() -> None:
    found = made(Region.whole((100_000,)), Integers(-5, 12), torch.int64)
    counts = found.unique(return_counts=True)
    assert counts[0].tolist() == list(range(-5, 12))
    assert float(counts[1].double().std() / counts[1].double().mean()) < 0.05


def test_holes_have_their_share_and_leave_the_other_integers_alone() -> None:
    whole = Region.whole((100_000,))
    full, holed = (made(whole, Integers(0, 50257, keep=keep), torch.int64) for keep in (1.0, 0.9))
    hole = holed == -100
    assert abs(float(hole.double().mean()) - 0.1) < 0.005
    assert torch.equal(holed[~hole], full[~hole])
    assert abs(correlation(hole.double(), full.double())) < 0.02
    assert int((made(whole, Integers(0, 9, keep=0.5, hole=77), torch.int64) == 77).sum()) > 49_000


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.5, 0.99, 1.0])
def test_a_mask_is_true_with_its_share(keep: float) -> None:
    found = made(Region.whole((200_000,)), Mask(keep), torch.bool)
    assert abs(float(found.double().mean()) - keep) < 0.005
    assert bool(found.all()) == (keep == 1.0)
    assert bool(found.any()) == (keep > 0.0)


MEMORY = """
import resource, sys, torch
from pathlib import Path
from ttrace.layouts.region import Region
from ttrace.values.generate import Normal, generate_values

def made(region):
    return generate_values("w", region, dtype=torch.float32, distribution=Normal())

rows = 1 << 12
regions = {
    "box": Region((1 << 15, 1 << 14), (((rows, 2 * rows),), ((0, 1 << 12), (3 << 12, 4 << 12)))),
    "one dim": Region.whole((1 << 25,)),
    "flat": Region.flat_of((1 << 14, 1 << 12), ((5, 5 + (1 << 25)),)),
}
made(Region.whole((1024, 1024)))
lines = Path("/proc/self/status").read_text().splitlines()
taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
limit = taken + int(float(sys.argv[2]) * (128 << 20))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
assert made(regions[sys.argv[1]]).nbytes == 128 << 20
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the data of a process, as Linux counts it")
@pytest.mark.skipif("TTRACE_SANITIZED" in os.environ, reason="sanitizers take terabytes of address space of their own")
@pytest.mark.parametrize("region", ["box", "one dim", "flat"])
def test_making_a_shard_takes_hardly_more_memory_than_the_shard(region: str) -> None:
    def make(times: float) -> subprocess.CompletedProcess[str]:
        # A limit, and not the peak that was resident: that one has the pages of libraries, which come and go.
        command = [sys.executable, "-c", MEMORY, region, str(times)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    enough = make(1.25)
    assert enough.returncode == 0, enough.stderr
    assert "can't allocate memory" in make(0.9).stderr


def test_rows_reach_every_edge_at_which_a_table_may_be_cut() -> None:
    found = made(Region.whole((512,)), Rows(50258), torch.int64)
    size = 50258 // 2
    assert found[:16:4].tolist() == [0, 50257, size, size - 1]
    for num_parts in (2, 4, 8, 16):
        for part in torch.arange(50258).chunk(num_parts):
            assert {int(part[0]), int(part[-1])} <= set(found.tolist())
    assert found.min() >= 0
    assert found.max() < 50258
    assert (made(Region.whole((100_000,)), Rows(9, keep=0.5, hole=-1), torch.int64) == -1).sum() > 49_000


def test_rows_below_a_limit_are_at_the_edges_of_the_whole_table() -> None:
    found = made(Region.whole((512,)), Rows(128, limit=97), torch.int64)
    assert found.max() == 96
    assert {0, 31, 32, 63, 64, 95, 96} <= set(found.tolist()), "shards of 128 rows, not of 97"
    assert made(Region.whole((512,)), Rows(128, limit=128), torch.int64).equal(
        made(Region.whole((512,)), Rows(128), torch.int64)
    )


@pytest.mark.parametrize("num_rows", [1, 2, 3, 17])
def test_rows_of_a_tiny_table_are_all_rows_of_it(num_rows: int) -> None:
    assert made(Region.whole((400,)), Rows(num_rows), torch.int64).unique().tolist() == list(range(num_rows))
