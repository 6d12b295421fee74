"""Expert parallelism: tokens are sent to experts and back by uneven all-to-alls over axis ep."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ttrace
from ttrace.capture.session import TracingSession
from zoo.harness.candidate import Candidate, Cell, data, default_device_type, updated
from zoo.harness.context import average
from zoo.harness.transformer import Experts, MixtureOfExperts, Shape, Transformer


def expert_parallel(shape: Shape, cell: Cell) -> Candidate:
    """Each rank along ep has a part of the batch and of the experts; along dp, its own microbatches.

    Experts are DTensors; where there is dp, plain tensors with a rule.
    """
    has_dp = "dp" in cell.parts
    names, outer = (("dp", "ep"), 2) if has_dp else (("ep",), 1)
    mesh = init_device_mesh(
        default_device_type(), (outer, cell.num_ranks // outer)[-len(names) :], mesh_dim_names=names
    )
    ep = mesh["ep"]
    model = Transformer(shape).to(cell.dtype)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.run = partial(run_there, ep.get_group())
            _keep_own(module.experts, ep, plain=has_dp)
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(session: TracingSession) -> None:
        with session.step():
            for _ in range(cell.num_microbatches):
                part = {name: leaf.chunk(ep.size())[ep.get_local_rank()] for name, leaf in data(shape).items()}
                batch = session.batch(part)
                (cell.loss(model(batch["ids"]), batch["labels"]) / cell.num_microbatches).backward()
            average(dense, dist.group.WORLD)
            # An expert has seen the tokens of all ranks along ep already.
            average(experts, mesh.get_group("dp") if has_dp else None, cell.num_ranks)
            updated(model, optimizer, cell.max_norm)

    rules = {"./loss": "+ep"} | ({"*.experts.w?": "expert/ep ..."} if has_dp else {})
    return Candidate([model], optimizer, step, outer, mesh, rules, 1 / cell.num_ranks)


def run_there(
    group: dist.ProcessGroup, experts: Experts, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Send each row to the rank that has its expert, and receive the result."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent, got = (numbers.view(world, -1).sum(1).tolist() for numbers in (counts, theirs))
    arrived = _travelled(rows, sent, got, group)
    numbers = _travelled(slots + rank * slots.numel(), sent, got, group)
    # They arrive sorted by expert within each sender; experts need them sorted over all senders.
    order = torch.arange(len(theirs) // world).repeat(world).repeat_interleave(theirs).argsort(stable=True)
    mine = theirs.view(world, -1).sum(0)
    out = experts(ttrace.holds(arrived[order], numbers[order], world * slots.numel()), mine)
    return _travelled(out[order.argsort()], got, sent, group)


def _travelled(x: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    exchange = all_to_all_single_autograd if x.is_floating_point() else all_to_all_single
    out: torch.Tensor = exchange(x.contiguous(), got, sent, group)
    return out


def _keep_own(experts: Experts, mesh: DeviceMesh, *, plain: bool) -> None:
    for name, parameter in list(experts.named_parameters()):
        cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        experts.register_parameter(name, nn.Parameter(cut.to_local().clone() if plain else cut))
