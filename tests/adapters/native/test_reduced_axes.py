"""Frameworks say over which axes they reduce gradients; along them a drift shows that rounding would hide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Verdict
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks

DRIFT = 1e-3


def name_axes() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = nn.Linear(4, 4)
    along_dp = DistributedDataParallel(nn.Linear(4, 4), process_group=mesh.get_group("dp"))
    along_all = DistributedDataParallel(nn.Linear(4, 4))
    sharded, replicated = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(sharded, mesh=hybrid["shard"])
    fully_shard(replicated, mesh=hybrid)
    adapters = [
        Native([along_dp], mesh="dp=2 tp=2"),
        Native([along_all], mesh="dp=2 tp=2"),
        Native([along_all]),
        Native([plain], mesh="dp=2 tp=2"),
        Native([along_dp, plain], mesh="dp=2 tp=2"),
        Native([sharded], mesh=hybrid),
        Native([replicated], mesh=hybrid),
    ]
    return [sorted(adapter.reduced_axes) for adapter in adapters]


@pytest.mark.slow
def test_axes_that_gradients_are_reduced_over_are_named() -> None:
    for found in on_ranks(4, name_axes):
        assert found == [["dp"], ["dp", "tp"], ["dp"], [], [], [], ["replicate"]]


def train(plan: Plan, *, is_reference: bool, drift: float = 0.0) -> None:
    """Train one step on two microbatches under autocast: one after the other, or each on a rank of its own."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    model = own if is_reference else DistributedDataParallel(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
    with session.step():
        for _ in range(2 if is_reference else 1):
            x, y = session.batch((torch.randn(32, 16), torch.randn(32, 8)))
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            (F.mse_loss(out.float(), y) / (2 if is_reference else 1)).backward()
        if drift and dist.get_rank() == 1:
            gradient = own.get_parameter("2.weight").grad
            assert gradient is not None
            gradient.mul_(1 + drift)
        optimizer.step()
    session.close()


def train_candidates(folder: Path) -> None:
    for name, drift in (("right", 0.0), ("drifting", DRIFT)):
        plan = Plan(out=folder / name, role="candidate", reference=folder / "reference", stop=False)
        train(plan, is_reference=False, drift=drift)


@pytest.mark.slow
def test_a_gradient_that_drifts_after_it_was_reduced_is_found_under_autocast(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path / "reference", stop=False)
    train(plan, is_reference=True)
    for twin in (1, 2, 3):
        update = {"out": tmp_path / f"twin-{twin}", "role": "twin", "twin": twin, "reference": plan.out}
        train(plan.model_copy(update=update), is_reference=True)
    on_ranks(2, train_candidates, tmp_path)
    twins = [Trace(tmp_path / f"twin-{twin}") for twin in (1, 2, 3)]
    right, drifting = (check(Trace(plan.out), twins, Trace(tmp_path / name)) for name in ("right", "drifting"))
    assert right.exit is Exit.PASSED
    assert drifting.exit is Exit.FOUND
    first = drifting.findings[0]
    assert str(first.comparison.id) == "0/-/2.weight/param_grad"
    assert first.comparison.verdict is Verdict.CONFLICT
    assert first.comparison.tolerance is not None
    assert first.comparison.tolerance.value > 4 * DRIFT  # rounding in bfloat16 alone would hide it
