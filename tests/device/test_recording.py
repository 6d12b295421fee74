"""What is recorded on a device is what the host would have recorded, bit for bit, however late kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device_steps import EMU, list_differences, trace_step

LAGS = {"none": (0, 0), "late": (1000, 1000), "late default stream": (1000, 0), "late side streams": (0, 1000)}


@pytest.fixture(params=LAGS)
def lag(request: pytest.FixtureRequest) -> Iterator[None]:
    EMU.set_lag(*LAGS[request.param])
    yield
    torch.accelerator.synchronize()
    EMU.set_lag(20)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Traces of the same step on the host."""
    made: dict[Any, Path] = {}

    def get(**settings: Any) -> Path:
        key = tuple(settings.items())
        if key not in made:
            made[key] = trace_step(tmp_path_factory.mktemp("host"), "cpu", **settings)
        return made[key]

    return get


@pytest.mark.usefixtures("lag")
@pytest.mark.parametrize("max_bytes_held", [64 << 20, 256 << 10], ids=["plenty", "little"])
def test_all_tensors_are_as_on_the_host(tmp_path: Path, host: Callable[..., Path], max_bytes_held: int) -> None:
    """With little memory, tensors are larger than a chunk, and chunks are used again and again."""
    device = trace_step(tmp_path, "emu:1", max_bytes_held=max_bytes_held)
    assert list_differences(host(), device) == []


@pytest.mark.usefixtures("lag")
def test_sketches_are_as_on_the_host(tmp_path: Path, host: Callable[..., Path]) -> None:
    device = trace_step(tmp_path, "emu", record="sketch")
    assert list_differences(host(record="sketch"), device, atol=1e-12) == []


def test_a_sketch_may_be_larger_than_a_chunk(tmp_path: Path, host: Callable[..., Path]) -> None:
    settings: dict[str, Any] = {"record": "sketch", "num_buckets": 8192}
    device = trace_step(tmp_path, "emu", max_bytes_held=256 << 10, **settings)
    assert list_differences(host(**settings), device, atol=1e-12) == []


@pytest.mark.usefixtures("lag")
def test_a_model_may_be_on_two_devices(tmp_path: Path, host: Callable[..., Path]) -> None:
    """Two threads bring gradients then, and their norms are added in another order."""
    device = trace_step(tmp_path, "emu:0", "emu:1")
    assert list_differences(host(), device, atol=1e-6, in_order=False) == []
