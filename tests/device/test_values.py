"""Values that are generated on the device are the host's, bit for bit; sketches agree, and are the same each time."""

from __future__ import annotations

import pytest
import torch

from ttrace.layouts.region import Region
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Permutation, Rows, Signed, generate_values
from ttrace.values.sketch import compute_sketch

REGIONS = {
    "whole": Region.whole((70, 3000)),
    "rows": Region((70, 3000), (((10, 40),), ((0, 3000),))),
    "columns": Region((70, 3000), (((0, 70),), ((500, 1700),))),
    "zigzag": Region((70, 3000), (((0, 20), (50, 70)), ((0, 3000),))),
    "many ranges": Region((70, 3000), (((0, 70),), tuple((start, start + 30) for start in range(0, 3000, 100)))),
    "flat": Region((70, 3000), (((0, 70),), ((0, 3000),)), flat=((1234, 99_999),)),
}
DISTRIBUTIONS = {
    "normal": (Normal(0.1, 0.02), torch.float32),
    "bfloat16": (Normal(1.0), torch.bfloat16),
    "signed": (Signed(2.0), torch.float32),
    "integers": (Integers(0, 50_000, keep=0.9), torch.int64),
    "rows": (Rows(50_000), torch.int64),
    "mask": (Mask(0.3), torch.bool),
    "permutation": (Permutation(), torch.int64),
}


@pytest.mark.parametrize(("distribution", "dtype"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_generated_values_are_the_hosts(region: Region, distribution: Distribution, dtype: torch.dtype) -> None:
    host, device = (
        generate_values("x", region, dtype=dtype, distribution=distribution, device=place) for place in ("cpu", "emu:1")
    )
    assert torch.equal(host, device.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_sketches_agree_with_the_hosts(region: Region, dtype: torch.dtype) -> None:
    tensor = generate_values("x", region, dtype=dtype, distribution=Normal())
    host, *device = (compute_sketch(tensor.to(place), region).cpu() for place in ("cpu", "emu", "emu"))
    assert torch.equal(*device)
    torch.testing.assert_close(device[0], host, rtol=0, atol=1e-12 * float(host.norm()))
