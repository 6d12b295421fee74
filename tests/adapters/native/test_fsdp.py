"""FSDP2 states over which ranks it reduces and what it divides by, also if a script has set it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.compat.torch import RELEASE
from ttrace.judge.verdict import Exit, Judgement
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import NUM_TWINS, SimulatedRank, judge

RANKS = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(plan: Plan, model: nn.Module, num_microbatches: int, *, divisor: float) -> None:
    """Train on microbatches of this rank's own; the script itself divides its losses by `divisor`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = Native([model]) if plan.role == "candidate" else SimulatedRank()
    session = TracingSession(SessionParts(plan, model, optimizer, adapter))
    with session.step():
        for _ in range(num_microbatches):
            x, y = session.batch((torch.randn(4, 8), torch.randn(4, 8)))
            (F.mse_loss(model(x), y) / divisor).backward()
        optimizer.step()
    session.close()


def build_sharded() -> nn.Module:
    model = build()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_summing() -> nn.Module:
    """Build a model whose gradients are summed: the script divides by the number of ranks itself."""
    model = build_sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(1.0)
    return model


def build_on_two_meshes() -> nn.Module:
    """Weights and biases are reduced over the same ranks, each by a mesh of its own."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    model = build()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    other = DeviceMesh.from_group(dist.new_group(list(range(RANKS))), "cpu", mesh_dim_names=("edp",))
    info = FSDPMeshInfo(other, shard_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "averaged": (build_sharded, 1.0, 1 / RANKS),
    "summed": (build_summing, float(RANKS), 1.0),
}
"""By name, the function that builds the model, the script's divisor of losses, and the factor of the reduction."""
if RELEASE >= (2, 12):
    CASES["two meshes"] = (build_on_two_meshes, 1.0, 1 / RANKS)


def run_cases(folder: Path) -> dict[str, tuple[Judgement, float]]:
    if dist.get_rank() == 0:
        plan = Plan(out=folder / "reference", stop=False)
        train(plan, build(), RANKS, divisor=float(RANKS))
        for twin in range(1, NUM_TWINS + 1):
            update = {"out": folder / f"twin-{twin}", "role": "twin", "twin": twin, "reference": plan.out}
            train(plan.model_copy(update=update), build(), RANKS, divisor=float(RANKS))
    dist.barrier()
    found = {}
    for name, (make, divisor, _) in CASES.items():
        out = folder / name.replace(" ", "_")
        plan = Plan(out=out, role="candidate", reference=folder / "reference", stop=False)
        train(plan, make(), 1, divisor=divisor)
        dist.barrier()
        if dist.get_rank() == 0:
            found[name] = judge(folder, out), Trace(out).grad_factor
    return found


@pytest.mark.slow
def test_what_fsdp_divides_by_is_read(tmp_path: Path) -> None:
    found: dict[str, tuple[Judgement, float]] = on_ranks(RANKS, run_cases, tmp_path)[0]
    for name, (_, _, factor) in CASES.items():
        judgement, stated = found[name]
        trouble = [(str(c.id), c.verdict, c.reason) for c in judgement.comparisons if c.spoils or c.verdict.is_wrong]
        assert stated == factor, name
        assert judgement.exit is Exit.PASSED, (name, judgement.problems, trouble[:5])
