"""Differences that look like bugs and are not: other orders of summation, buckets and kernels, and randomness."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zoo.bug import Patch
from zoo.harness.breaking import SHAPE
from zoo.harness.candidate import Candidate, Cell, simple
from zoo.harness.small import Small
from zoo.harness.transformer import Attention, FeedForward, Shape, Transformer

Layout = Callable[[Shape, Cell], Candidate]


@dataclass(frozen=True)
class Lookalike:
    """A case with what is legitimately different in its candidate."""

    case: Small
    patch: Patch | None = None
    is_random: bool = False


def all_of_them() -> Iterator[tuple[str, Lookalike]]:
    for dtype in (torch.float32, torch.bfloat16):
        word = str(dtype).removeprefix("torch.")
        for name, (layout, patch) in PATCHES.items():
            yield f"{name}-{word}", Lookalike(_small(layout, dtype), patch)
        for name, wrap in LAYOUTS.items():
            yield f"{name}-{word}", Lookalike(replace(_small(name, dtype), layout=wrap))
        for name, (layout, adapt) in MODELS.items():
            case = _small(layout, dtype, replace(SHAPE, adapt=adapt))
            yield f"{name}-{word}", Lookalike(case, is_random=adapt is drop_functionally)


def _small(layout: str, dtype: torch.dtype, shape: Shape = SHAPE) -> Small:
    return Small(Cell(layout, 2, dtype), shape)


# Other orders of summation, other kernels


def summed_in_reverse(candidate: Candidate) -> None:
    """Gradients added up from the last rank to the first."""

    def reduced(bucket: Any) -> Any:
        everyones = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
        work: Any = dist.all_gather(everyones, bucket.buffer(), async_op=True)
        return work.get_future().then(lambda _: functools.reduce(torch.add, reversed(everyones)) / len(everyones))

    ddp: Any = candidate.chunks[0]
    ddp.register_comm_hook(None, lambda _state, bucket: reduced(bucket))


def reduced_in_float32(candidate: Candidate) -> None:
    """Gradients are added up in more precision than they have."""

    def reduced(bucket: Any) -> Any:
        wide = bucket.buffer().float() / dist.get_world_size()
        work: Any = dist.all_reduce(wide, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].to(bucket.buffer().dtype))

    ddp: Any = candidate.chunks[0]
    ddp.register_comm_hook(None, lambda _state, bucket: reduced(bucket))


def products_in_halves(candidate: Candidate) -> None:
    """Every product of a feed-forward as the sum of two."""
    for module in _modules(candidate, FeedForward):
        for linear in module.children():
            linear.forward = functools.partial(_in_halves, linear)


def _in_halves(linear: Any, x: torch.Tensor) -> torch.Tensor:
    middle = x.shape[-1] // 2
    return F.linear(x[..., :middle], linear.weight[:, :middle]) + F.linear(x[..., middle:], linear.weight[:, middle:])


def unfused_attention(candidate: Candidate) -> None:
    for module in _modules(candidate, Attention):
        module.attend = softmax_attention


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
    out: torch.Tensor = scores.float().softmax(-1).to(v.dtype) @ v
    return out


def fused_optimizer(candidate: Candidate) -> None:
    for group in candidate.optimizer.param_groups:
        group["fused"] = True


def many_tensors_at_once(candidate: Candidate) -> None:
    for group in candidate.optimizer.param_groups:
        group["foreach"] = True


def kept_unsharded(candidate: Candidate) -> None:
    model: Any = candidate.chunks[0]
    model.set_reshard_after_forward(False)


def divided_by_hand(candidate: Candidate) -> None:
    """The sum over ranks, divided by their number: what averaging is."""
    model: Any = candidate.chunks[0]
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(float(dist.get_world_size()))


def _modules(candidate: Candidate, kind: type[nn.Module]) -> Iterator[Any]:
    return (module for chunk in candidate.chunks for module in chunk.modules() if isinstance(module, kind))


PATCHES: dict[str, tuple[str, Patch]] = {
    "summed-in-reverse": ("ddp", summed_in_reverse),
    "reduced-in-float32": ("ddp", reduced_in_float32),
    "products-in-halves": ("cp-ulysses", products_in_halves),
    "products-in-halves-pp": ("pp-1f1b", products_in_halves),
    "unfused-attention": ("ddp", unfused_attention),
    "unfused-attention-fsdp": ("fsdp", unfused_attention),
    "fused-optimizer": ("ddp", fused_optimizer),
    "many-tensors-at-once": ("zero", many_tensors_at_once),
    "kept-unsharded": ("fsdp", kept_unsharded),
    "divided-by-hand": ("fsdp", divided_by_hand),
}


# Other wrappers


def small_buckets(shape: Shape, cell: Cell) -> Candidate:
    model = DistributedDataParallel(Transformer(shape).to(cell.dtype), bucket_cap_mb=1e-3)
    return simple(model, shape, cell, num_data_ranks=cell.num_ranks)


def one_shard_for_all(shape: Shape, cell: Cell) -> Candidate:
    """FSDP2 around the whole model only, with gradients reduced in float32."""
    mesh = init_device_mesh("cpu", (cell.num_ranks,), mesh_dim_names=("dp",))
    model = Transformer(shape).to(cell.dtype)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return simple(model, shape, cell, num_data_ranks=cell.num_ranks)


LAYOUTS: dict[str, Layout] = {"small-buckets": small_buckets, "one-shard-for-all": one_shard_for_all}


# Other models, on both sides


def drop(model: nn.Module) -> None:
    """Dropout as a module, which is switched off while tracing."""
    _after(model.get_submodule("layers.1"), nn.Dropout(0.1))


def drop_functionally(model: nn.Module) -> None:
    """Dropout as a function, which can only be recognised."""
    _after(model.get_submodule("layers.1"), functools.partial(F.dropout, p=0.1))


def _after(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if isinstance(function, nn.Module):
        module.add_module("dropout", function)
    forward = module.forward
    module.forward = lambda *args: function(forward(*args))


def shift_logits(model: nn.Module) -> None:
    """One number added to all logits, of which the loss does not depend: Adam steps by its rounding errors."""
    shift = nn.Parameter(torch.zeros(1))
    model.register_parameter("shift", shift)
    forward = model.forward
    model.forward = lambda ids: forward(ids) + model.shift.to(next(model.parameters()).dtype)


def in_float8(model: nn.Module) -> None:
    """torchao's float8 training, emulated; the head stays as it is."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "output" and "router" not in name

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=is_inner)


MODELS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "dropout": ("ddp", drop),
    "dropout-tp": ("tp", drop),
    "functional-dropout": ("ddp", drop_functionally),
    "gradient-of-nothing": ("ddp", shift_logits),
    "gradient-of-nothing-cp": ("cp-gather", shift_logits),
}
