"""Bugs that happen in practice, each one small function of a candidate, called on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zoo.harness.candidate import Candidate, accumulated
from zoo.harness.faults import FAULTS, inject
from zoo.harness.gpt import AllReduce
from zoo.harness.transformer import Shape

SHAPE = Shape(vocab=48, hidden=16, ffn=24, length=8)
NUM_MICROBATCHES = 3
"""Different from the size of every axis, so that a factor identifies it."""

Break = Callable[[Candidate], None]


def module_of(candidate: Candidate, name: str) -> Any:
    """Return a module by its name in the reference; None if this rank does not have it."""
    for chunk in candidate.chunks:
        for path, module in chunk.named_modules():
            if path.removeprefix("module.") == name:
                return module
    return None


def parameter_of(candidate: Candidate, name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(module_of(candidate, module), leaf)


def then(candidate: Candidate, name: str, wrong: Callable[[Any], Any], *, on_rank: int | None = None) -> None:
    """Change the output of a module, on all ranks or on one."""
    module = module_of(candidate, name)
    if module is not None and on_rank in (None, dist.get_rank()):
        forward = module.forward
        module.forward = lambda *args, **kwargs: wrong(forward(*args, **kwargs))


def at_gradient(candidate: Candidate, name: str, wrong: Callable[[Any], Any], *, on_rank: int | None = None) -> None:
    """Change the gradient of a parameter as soon as it is complete."""
    if on_rank in (None, dist.get_rank()):
        parameter_of(candidate, name).register_hook(wrong)


# Tensor parallelism


def no_sum_in(name: str) -> Break:
    """A row-parallel layer without the all-reduce of its forward, or a column-parallel one without its backward's."""

    def breaks(candidate: Candidate) -> None:
        module_of(candidate, name).tp = 1

    return breaks


def sums_twice(candidate: Candidate) -> None:
    module = module_of(candidate, "layers.2.mlp.fc1")
    forward = module.forward
    module.forward = lambda x: forward(AllReduce.apply(x, False, True))  # type: ignore[no-untyped-call]


def bias_on_every_rank(candidate: Candidate) -> None:
    module = module_of(candidate, "layers.0.mlp.fc2")
    module.forward = lambda x: AllReduce.apply(F.linear(x, module.weight, module.bias), True, False)  # type: ignore[no-untyped-call]


def keys_for_values(candidate: Candidate) -> None:
    """The thirds of a fused projection in another order."""

    def wrong(out: torch.Tensor) -> torch.Tensor:
        q, k, v = out.chunk(3, -1)
        return torch.cat([q, v, k], -1)

    then(candidate, "layers.1.attention.qkv", wrong)


def first_rows_lost(candidate: Candidate) -> None:
    """The first row of each shard of the vocabulary has no gradient: an off-by-one in the mask of a shard."""

    def wrong(gradient: DTensor) -> DTensor:
        gradient.to_local()[0] = 0.0
        return gradient

    at_gradient(candidate, "tok.weight", wrong)


def other_layers_weight(candidate: Candidate) -> None:
    """A checkpoint's layer loaded into another."""
    ours, theirs = (parameter_of(candidate, f"layers.{i}.mlp.fc1.weight") for i in (2, 1))
    with torch.no_grad():
        ours.copy_(theirs)


def shard_off_by_percents(candidate: Candidate) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameter_of(candidate, "layers.1.attention.qkv.weight").mul_(1.02)


def unreduced(name: str) -> Break:
    return functools.partial(inject, "unreduced", name)


# Sequence and context parallelism


def norm_gradient_not_summed(candidate: Candidate) -> None:
    def wrong(gradient: DTensor) -> DTensor:
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

    at_gradient(candidate, "layers.1.ffn_norm.weight", wrong)


def exchanged(local: torch.Tensor) -> torch.Tensor:
    """The other rank's values, in this one's graph."""
    everyones = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, local.detach().contiguous())
    return local + (everyones[1 - dist.get_rank()] - local).detach()


def chunks_exchanged(candidate: Candidate) -> None:
    def wrong(out: DTensor) -> DTensor:
        return DTensor.from_local(exchanged(out.to_local()), out.device_mesh, out.placements, run_check=False)

    then(candidate, "layers.1.ffn_norm", wrong)


def positions_not_offset(candidate: Candidate) -> None:
    """Every rank believes that its part of the sequence is the first."""
    for chunk in candidate.chunks:
        rope: Any = chunk.rope
        dist.broadcast(rope, 0)


def left_out_of_reduction(name: str) -> Break:
    def breaks(candidate: Candidate) -> None:
        for parameter in module_of(candidate, name).parameters():
            parameter.is_left_out = True

    return breaks


def divided_twice(name: str) -> Break:
    return lambda candidate: at_gradient(candidate, name, lambda gradient: gradient / dist.get_world_size())


# Data parallelism and sharded optimizers


def not_synchronised(candidate: Candidate) -> None:
    ddp: Any = candidate.chunks[0]
    ddp.require_backward_grad_sync = False


def summed_not_averaged(candidate: Candidate) -> None:
    def summed(bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp: Any = candidate.chunks[0]
    ddp.register_comm_hook(
        None, lambda _state, bucket: summed(bucket)
    )  # DDP looks at annotations, and a lambda has none


def not_divided(candidate: Candidate) -> None:
    """Gradients summed over microbatches and not averaged."""
    for parameter in candidate.chunks[0].parameters():
        parameter.register_hook(lambda gradient: gradient * NUM_MICROBATCHES)


def yesterdays_data(candidate: Candidate) -> None:
    """From the second microbatch on, rank 1 is fed what it had before."""
    seen: list[torch.Tensor] = []

    def before(_module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        seen.append(args[0])
        return (seen[-2] if len(seen) > 1 else args[0],)

    if dist.get_rank() == 1:
        candidate.chunks[0].register_forward_pre_hook(before, prepend=True)


def no_sharing_of_updates(candidate: Candidate) -> None:
    """A sharded optimizer whose ranks keep their updates for themselves."""
    optimizer: Any = candidate.optimizer
    optimizer._sync_params = lambda: None


def shard_without_gradient(candidate: Candidate) -> None:
    if dist.get_rank() == 1:
        weight = parameter_of(candidate, "layers.2.feed_forward.w2.weight")
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().zero_())


def block_not_averaged(candidate: Candidate) -> None:
    block = module_of(candidate, "layers.1")
    block.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    block.set_gradient_divide_factor(1.0)


def replica_drifts(candidate: Candidate) -> None:
    """One of the replicas of a sharded weight has another gradient."""
    if dist.get_rank() >= 2:
        weight = parameter_of(candidate, "layers.2.feed_forward.w2.weight")
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(1.5))


# Pipelines and experts


def stale(name: str) -> Break:
    """A buffer that is overwritten too late: from the second microbatch on, the one before."""

    def breaks(candidate: Candidate) -> None:
        if module_of(candidate, name) is not None:
            then(candidate, name, FAULTS["stale"]())

    return breaks


def layer_lost(candidate: Candidate) -> None:
    """The last stage begins a layer too late."""
    layers: Any = candidate.chunks[-1].layers
    if "2" in layers:
        del layers["2"]


def rows_come_back_shifted(candidate: Candidate) -> None:
    then(candidate, "layers.2.feed_forward.experts", lambda rows: rows.roll(1, 0), on_rank=1)


def one_expert_lost(candidate: Candidate) -> None:
    def wrong(gradient: DTensor) -> DTensor:
        if dist.get_rank() == 1:
            gradient.to_local()[0] = 0.0
        return gradient

    at_gradient(candidate, "layers.1.feed_forward.experts.w2", wrong)


# Optimizer and clipping


def left_out_of_optimizer(candidate: Candidate) -> None:
    weight = parameter_of(candidate, "layers.1.norm2.weight")
    for group in candidate.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not weight]


def in_two_groups(candidate: Candidate) -> None:
    weight = parameter_of(candidate, "layers.1.mlp.fc2.weight")
    group = candidate.optimizer.param_groups[0]
    candidate.optimizer.param_groups.append({**group, "params": [weight]})


def other_learning_rate(candidate: Candidate) -> None:
    weight = parameter_of(candidate, "head.weight")
    group = candidate.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not weight]
    candidate.optimizer.param_groups.append({**group, "params": [weight], "lr": 1.5 * group["lr"]})


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def warming_up(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose learning rate is 0 in the first step; its schedule follows each step."""
    optimizer: Any = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    optimizer.register_step_post_hook(lambda *_: optimizer.schedule.step())
    return cast(torch.optim.Optimizer, optimizer)


def set_in_optimizer(**settings: Any) -> Break:
    """Give all groups of the optimizer other settings."""

    def change(candidate: Candidate) -> None:
        for group in candidate.optimizer.param_groups:
            group.update(settings)

    return change


def warms_up_to_another_rate(candidate: Candidate) -> None:
    optimizer: Any = candidate.optimizer
    optimizer.schedule.base_lrs = [1.1 * rate for rate in optimizer.schedule.base_lrs]


def schedule_stepped_by_every_rank(candidate: Candidate) -> None:
    optimizer: Any = candidate.optimizer
    optimizer.register_step_post_hook(lambda *_: optimizer.schedule.step())


def with_dropout(model: nn.Module) -> None:
    """Add a dropout after the last norm."""
    model.norm = nn.Sequential(cast(nn.Module, model.norm), nn.Dropout(0.1))


def other_dropout(candidate: Candidate) -> None:
    for module in candidate.chunks[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


def evaluated(candidate: Candidate) -> None:
    candidate.chunks[0].eval()


def counted_twice(candidate: Candidate) -> None:
    """Gradients that all ranks share, summed into the norm by each of them."""
    model: Any = candidate.chunks[0]
    every = list(model.parameters())
    model.parameters = lambda: iter([*every, *every])


def other_max_norm(candidate: Candidate) -> None:
    """The threshold is twice what it should be."""
    optimizer: Optimizer = candidate.optimizer
    model = candidate.chunks[0]
    shape = replace(SHAPE, recompute="none")

    def step(session: Any) -> None:
        accumulated(session, model, optimizer, shape, NUM_MICROBATCHES, max_norm=0.2)

    candidate.step = step


# Recomputation, dtypes, and what is simply wrong


def recomputed_otherwise(candidate: Candidate) -> None:
    def wrong(out: torch.Tensor) -> torch.Tensor:
        return out if torch._C._current_graph_task_id() == -1 else out * 1.1

    then(candidate, "layers.1.ffn_norm", wrong)


def weaker(name: str, dtype: torch.dtype) -> Break:
    return lambda candidate: then(candidate, name, lambda out: out.to(dtype).float())


def overflows(candidate: Candidate) -> None:
    def wrong(out: torch.Tensor) -> torch.Tensor:
        return out.index_fill(1, torch.tensor([3]), torch.inf)

    then(candidate, "layers.1.mlp.fc1", wrong, on_rank=1)


def gradient_detached(candidate: Candidate) -> None:
    at_gradient(candidate, "layers.0.attention.proj.weight", torch.zeros_like)


def read_transposed(candidate: Candidate) -> None:
    then(candidate, "layers.1.norm2", lambda out: out.transpose(1, 2).reshape(out.shape))


def wrong_sign(candidate: Candidate) -> None:
    then(candidate, "layers.2.norm1", lambda out: -out)
