"""The emulated device does what a GPU does, and punishes what a GPU punishes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.device_steps import EMU


@pytest.fixture(params=[0, 1000])
def lag(request: pytest.FixtureRequest) -> Iterator[int]:
    """How late kernels are, in milliseconds."""
    EMU.set_lag(request.param)
    yield request.param
    torch.accelerator.synchronize()
    EMU.set_lag(20)


@pytest.fixture
def late() -> Iterator[None]:
    """Late kernels, for what only shows then."""
    EMU.set_lag(1000)
    yield
    torch.accelerator.synchronize()
    EMU.set_lag(20)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


def train(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[float]:
    """Train a small transformer and return its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 32), Block(), Block(), nn.LayerNorm(32), nn.Linear(32, 96)).to(dtype)
    ids = torch.randint(96, (2, 16))
    model, ids = model.to(device), ids.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("lag")
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_transformer_trains_as_on_the_host(options: dict[str, Any]) -> None:
    expected = train("cpu", **options)
    # Of the fused one, the last bits were seen to differ.
    assert train("emu:1", **options) == (pytest.approx(expected, rel=1e-6) if "fused" in options else expected)


def test_bfloat16_trains_with_statistics_of_norms_in_float32() -> None:
    x = torch.randn(4, 32).to("emu", torch.bfloat16)
    _, mean, _ = torch.native_layer_norm(x, [32], None, None, 1e-5)
    assert mean.dtype == torch.float32
    losses = train("emu", torch.bfloat16)
    assert losses[-1] < losses[0] - 0.3


def test_autocast_chooses_by_operator() -> None:
    x, y = torch.randn(4, 4, device="emu"), torch.randn(4, 4, device="emu")
    with torch.autocast("emu", torch.bfloat16):
        assert (x @ y).dtype == torch.bfloat16
        assert torch.softmax(x @ y, -1).dtype == torch.float32


def test_dropout_draws_from_the_devices_generator() -> None:
    host = torch.get_rng_state()
    EMU.manual_seed(3)
    first = F.dropout(torch.ones(1000, device="emu"), 0.5)
    EMU.manual_seed(3)
    assert torch.equal(first.cpu(), F.dropout(torch.ones(1000, device="emu"), 0.5).cpu())
    assert 0.3 < (first.cpu() == 0).double().mean() < 0.7
    assert torch.equal(host, torch.get_rng_state())


def test_sums_may_have_another_order_each_time() -> None:
    a, b = torch.randn(64, 4096).to("emu"), torch.randn(4096, 64).to("emu")
    assert torch.equal((a @ b).cpu(), (a @ b).cpu())
    EMU.set_random_sums(True)
    try:
        first, second = (a @ b).cpu(), (a @ b).cpu()
    finally:
        torch.accelerator.synchronize()
        EMU.set_random_sums(False)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=0)


def test_backward_runs_in_the_devices_thread() -> None:
    threads = set()
    x = torch.ones(2, device="emu", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: threads.add(threading.get_ident()))
    y.sum().backward()
    assert threads
    assert threading.get_ident() not in threads


def test_waits_are_counted_with_their_threads() -> None:
    x = torch.ones(8, device="emu")
    EMU.clear_logs(False)
    y = x * 2
    assert EMU.waits() == []
    y.sum().item()
    y.cpu()
    torch.ones(8).to("emu")
    assert EMU.waits() == [
        (threading.get_native_id(), what) for what in ("item", "copy to the host", "copy to the device")
    ]


def test_a_tensor_of_the_host_is_refused_beside_one_of_the_device() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device="emu") + torch.ones(4)
    assert (torch.ones(4, device="emu") + torch.tensor(1.0)).sum().item() == 8


# Races: each is run as it must not be, and as it must be.


@pytest.mark.usefixtures("late")
def test_a_copy_that_is_read_too_early() -> None:
    host = (torch.ones(1000, device="emu") * 2).to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert (host == 2).all()


@pytest.mark.usefixtures("late")
def test_a_side_stream_that_does_not_wait() -> None:
    side = EMU.Stream()
    for waits, expected in ((False, 0.0), (True, 2.0)):
        a = torch.zeros(1000, device="emu")
        torch.accelerator.synchronize()
        a.add_(2)
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            b = a.clone()
        side.synchronize()
        torch.accelerator.synchronize()
        assert b.cpu().unique().tolist() == [expected]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_reads_it(is_recorded: bool) -> None:
    side = EMU.Stream()
    a = torch.full((1000,), 3.0, device="emu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        b = a + 0
    if is_recorded:
        a.record_stream(side)
    del a
    other = torch.zeros(1000, device="emu")  # gets the same memory, if it is free
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.current_stream().wait_stream(side)
    assert (b.cpu() == 3).all() == is_recorded
    assert not other.any()


@pytest.mark.usefixtures("late")
def test_pinned_memory_that_is_reused_too_early() -> None:
    source = torch.ones(1000, pin_memory=True)
    device = source.to("emu", non_blocking=True)
    source.fill_(7)
    assert device.cpu().unique().tolist() == [7]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("waits", [False, True])
def test_a_gradient_that_is_read_before_a_side_streams_reduction_ended(waits: bool) -> None:
    reduction = EMU.Stream()
    weight = torch.ones(1000, device="emu", requires_grad=True)
    (weight * 2).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    reduction.wait_stream(torch.accelerator.current_stream())
    with reduction:
        gradient.mul_(0.5)  # the average over two ranks
    if waits:
        torch.accelerator.current_stream().wait_stream(reduction)
    assert gradient.cpu().unique().tolist() == [1 if waits else 2]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("waits", [False, True])
def test_a_parameter_that_is_read_while_it_is_gathered(waits: bool) -> None:
    gathering = EMU.Stream()
    shard = torch.ones(500, device="emu")
    gathering.wait_stream(torch.accelerator.current_stream())
    whole = torch.empty(1000, device="emu")
    gathering.wait_stream(torch.accelerator.current_stream())
    with gathering:
        whole[:500].copy_(shard)
        whole[500:].copy_(shard)
    if waits:
        torch.accelerator.current_stream().wait_stream(gathering)
    assert bool(whole.cpu().isnan().any()) != waits
    torch.accelerator.synchronize()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_buffer_that_is_freed_while_it_is_copied(is_recorded: bool) -> None:
    copying = EMU.Stream()
    host = torch.empty(1000, pin_memory=True)
    source = torch.full((1000,), 5.0, device="emu")
    copying.wait_stream(torch.accelerator.current_stream())
    with copying:
        host.copy_(source, non_blocking=True)
    if is_recorded:
        source.record_stream(copying)
    del source
    other = torch.zeros(1000, device="emu")
    torch.accelerator.current_stream().synchronize()
    copying.synchronize()
    assert (host == 5).all() == is_recorded
    assert not other.any()


# What ends a process.


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_host_cannot_read_the_devices_memory() -> None:
    ended = run("import ctypes, torch; ctypes.string_at(torch.ones(4, device='emu').data_ptr(), 4)")
    assert ended.returncode == -11


def test_a_kernel_that_fails_ends_the_device() -> None:
    ended = run(
        "import torch\n"
        "x = torch.nn.functional.embedding(torch.tensor([9], device='emu'), torch.ones(4, 4, device='emu'))\n"
        "print('issued')\n"
        "for _ in range(2):\n"
        "    try: torch.ones(2, device='emu').sum().item()\n"
        "    except torch.AcceleratorError as error: print(type(error).__name__)\n"
    )
    assert ended.stdout.split() == ["issued", "AcceleratorError", "AcceleratorError"], ended.stderr
