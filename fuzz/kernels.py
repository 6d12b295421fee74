"""The C kernels under sanitizers: all tests of values, and shapes, strides and offsets that nobody chose.

The sources are compiled once more, with AddressSanitizer and UndefinedBehaviorSanitizer. Whatever they find ends the
process. What each variant computes is also compared with what torch computes.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

import hatch_build
from fuzz.target import ROOT
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.values.checksum import compute_checksum
from ttrace.values.generate import Normal, Signed, generate_values
from ttrace.values.kernels import choice, library
from ttrace.values.sketch import compute_sketch
from ttrace.values.stats import Stats, measure_difference, measure_sums

_SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
_DTYPES = list(library.DTYPES)
_LONG = (0, 1, 2, 5, 31, 32, 33, 63, 64, 65, 127, 1000, 1023, 1024, 1025, 2049)
_WIDE = (0, 1, 2, 3, 17, 33, 64, 100, 257)
_SMALL = (0, 1, 1, 2, 3, 5, 7, 16, 31)
_MAX_SHOWN = 10


def run_kernels(num_shapes: int) -> int:
    """Compile with sanitizers, then run the tests and the shapes, each in a process of its own."""
    compiler = os.environ.get("CC", "cc")
    preload = subprocess.run([*compiler.split(), "-print-file-name=libasan.so"], capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = hatch_build.compile_kernels([*compiler.split(), *_SANITIZERS.split()], Path(scratch))
        environment = {**os.environ, **_OPTIONS, "LD_PRELOAD": preload.stdout.strip(), "TTRACE_SANITIZED": str(built)}
        failures = 0
        for what, arguments in {"tests/values": ["tests"], f"{num_shapes} shapes": ["shapes", str(num_shapes)]}.items():
            start = time.monotonic()
            command = [sys.executable, "-m", "fuzz.kernels", *arguments]
            status = subprocess.run(command, env=environment, cwd=ROOT).returncode
            failures += bool(status)
            print(
                f"kernels: {what}, {'failed' if status else 'no failures'}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    print(f"fuzz: kernels under sanitizers, {failures} failures")
    return 1 if failures else 0


def main(what: str, number: str = "0") -> int:
    """Run in a process in which the sanitizers are loaded."""
    library._FILE = Path(os.environ["TTRACE_SANITIZED"])
    assert choice.list_variants(), "the kernels that were compiled with sanitizers were not loaded"
    if what == "tests":
        import pytest

        # Child processes of tests load the ordinary library.
        return int(pytest.main(["-q", "-p", "no:cacheprovider", "tests/values"]))
    return _compare_shapes(int(number))


def _compare_shapes(count: int) -> int:
    random, wrong = Random(0), []
    variants = choice.list_variants()
    compare = (_compare_stats, _compare_stats, _compare_sums, _compare_sketches, _compare_values, _compare_checksums)
    for number in range(count):
        torch.manual_seed(number)
        found = random.choice(compare)(random, random.choice(variants))
        if found:
            wrong.append(f"shape {number}: {found}")
            print(wrong[-1], flush=True)
        if len(wrong) == _MAX_SHOWN:
            break
    return 1 if wrong else 0


def _compare_stats(random: Random, variant: str) -> str:
    shape = _draw_shape(random)
    a, b = (_make_tensor(shape, random.choice(_DTYPES), random) for _ in range(2))
    b = a if random.random() < 0.2 else b
    with choice.use_kernels(variant):
        ours = measure_difference(a, b)
    with choice.use_kernels(choice.TORCH):
        theirs = measure_difference(a, b)
    return _find_difference(f"stats {variant} {shape} {a.dtype} {a.stride()} {b.dtype} {b.stride()}", ours, theirs)


def _compare_sums(random: Random, variant: str) -> str:
    shape = _draw_shape(random)
    sides = [
        [(random.choice((1.0, -1.0, 0.5)), _make_tensor(shape, random.choice(_DTYPES), random)) for _ in range(count)]
        for count in (random.choice((1, 2, 3)), random.choice((1, 2, 3)))
    ]
    with choice.use_kernels(variant):
        ours = measure_sums(sides[0], sides[1])
    with choice.use_kernels(choice.TORCH):
        theirs = measure_sums(sides[0], sides[1])
    return _find_difference(f"sums {variant} {shape}", ours, theirs)


def _find_difference(what: str, ours: Stats, theirs: Stats) -> str:
    """Say how two measurements of the same tensors differ by more than the order of sums explains."""
    for name in ("count", "aa", "bb", "dd", "ab", "nan_a", "inf_a", "nan_b", "inf_b"):
        a, b = float(getattr(ours, name)), float(getattr(theirs, name))
        size = max(ours.aa, ours.bb, theirs.aa, theirs.bb) if name in ("dd", "ab") else max(abs(a), abs(b))
        if not (a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= 1e-6 * size):
            return f"{what}: {name} is {a}, but torch has {b}"
    return ""


def _compare_sketches(random: Random, variant: str) -> str:
    region, num_buckets = _draw_region(random), random.choice((64, 128, 1024))
    tensor = _make_tensor(region.local_shape, random.choice(_DTYPES), random)
    with choice.use_kernels(variant):
        ours = compute_sketch(tensor, region, num_buckets)
    with choice.use_kernels(choice.TORCH):
        theirs = compute_sketch(tensor, region, num_buckets)
    is_close = torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    return "" if is_close else f"sketch {variant} {region} {tensor.dtype} {tensor.stride()}"


def _compare_values(random: Random, variant: str) -> str:
    region, dtype = _draw_region(random), random.choice(_DTYPES[:4])
    distribution = random.choice((Normal(), Signed(0.5), Normal(1e30, 1e38)))
    seed = random.randrange(2**63)
    tensor_id = TensorId.parse("0/0/m/output")
    made = []
    for name in (variant, choice.TORCH):
        with choice.use_kernels(name):
            made.append(generate_values(tensor_id, region, dtype=dtype, distribution=distribution, seed=seed))
    is_same = torch.equal(
        made[0].contiguous().view(-1).view(torch.uint8), made[1].contiguous().view(-1).view(torch.uint8)
    )
    return "" if is_same else f"values {variant} {region} {dtype} {distribution} seed {seed}"


def _compare_checksums(random: Random, variant: str) -> str:
    tensor = torch.randint(0, 256, (random.choice(_LONG) + random.randrange(9),), dtype=torch.uint8)
    part = tensor[random.randrange(min(9, tensor.numel() + 1)) :]
    found, before = [], random.randrange(2**32)
    for name in (variant, choice.TORCH):
        with choice.use_kernels(name):
            found.append(compute_checksum(part, before))
    return "" if found[0] == found[1] else f"checksum {variant} of {part.numel()} bytes at {part.storage_offset()}"


def _draw_shape(random: Random) -> tuple[int, ...]:
    num_dims = random.choice((0, 1, 1, 2, 2, 3, 4, 5))
    sizes = _LONG if num_dims == 1 else _WIDE if num_dims == 2 else _SMALL
    shape = tuple(random.choice(sizes) for _ in range(num_dims))
    return shape if math.prod(shape) <= 1 << 15 else shape[:2] if num_dims > 2 else (shape[0],)


def _draw_region(random: Random) -> Region:
    shape = tuple(random.choice((1, 2, 5, 8, 33, 64, 100)) for _ in range(random.choice((1, 1, 2, 3))))
    shape = shape if math.prod(shape) <= 1 << 15 else shape[:1]
    dims = tuple(rg.whole(size) if random.random() < 0.4 else _draw_ranges(size, random) for size in shape)
    region = Region(shape, dims)
    if random.random() < 0.3:
        return Region(shape, dims, _draw_ranges(math.prod(region.box_shape), random))
    return region


def _draw_ranges(size: int, random: Random) -> rg.Ranges:
    """Draw ranges that do not overlap, in any order."""
    marks = sorted(random.sample(range(size + 1), min(size + 1, 2 * random.choice((1, 1, 2, 4)))))
    drawn = list(zip(marks[::2], marks[1::2], strict=False))
    random.shuffle(drawn)
    return rg.merge(drawn)


def _make_tensor(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    """Make a tensor with other strides, another offset or another alignment than most have."""
    make = random.choice(
        (_make_plain, _make_permuted, _make_stepped, _make_expanded, _make_overlapping, _make_unaligned)
    )
    return make(shape, dtype, random)


def _draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _make_plain(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float64)
    if values.numel() and random.random() < 0.3:
        values.view(-1)[random.randrange(values.numel())] = random.choice((math.nan, math.inf, -math.inf, 1e30))
    return values.to(dtype)


def _make_permuted(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    order = random.sample(range(len(shape)), len(shape))
    return _draw(tuple(shape[dim] for dim in order), dtype).permute([order.index(dim) for dim in range(len(shape))])


def _make_stepped(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    steps = [random.choice((1, 1, 2, 3)) for _ in shape]
    starts = [random.randrange(3) for _ in shape]
    full = tuple(start + size * step for size, step, start in zip(shape, steps, starts, strict=True))
    if math.prod(full) > 1 << 17:
        return _draw(shape, dtype)
    cuts = zip(starts, full, steps, strict=True)
    return _draw(full, dtype)[tuple(slice(start, stop, step) for start, stop, step in cuts)]


def _make_expanded(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    return _draw(tuple(1 if random.random() < 0.5 else size for size in shape), dtype).expand(shape)


def _make_overlapping(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    strides = [random.randrange(4) for _ in shape]
    needed = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size) + 1
    return _draw((max(needed, 1),), dtype).as_strided(shape, strides)


def _make_unaligned(shape: tuple[int, ...], dtype: torch.dtype, random: Random) -> torch.Tensor:
    values = _draw(shape, dtype).contiguous()
    if not values.numel():
        return values
    offset = random.randrange(1, 8)
    memory = bytearray(offset + values.nbytes)
    held = (ctypes.c_char * len(memory)).from_buffer(memory)
    ctypes.memmove(ctypes.addressof(held) + offset, values.data_ptr(), values.nbytes)
    return torch.frombuffer(memory, dtype=dtype, count=values.numel(), offset=offset).view(shape)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
