"""This module is a catalogue of faults as they happen in distributed training, and of what must be said of each.

Every fault is one small function that breaks a candidate: after the session attached to it, or before, where the model
itself is another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from tests.support.candidate import Candidate, Cell, accumulated
from tests.support.cells import LAYOUTS, Traced, attached, reference_of, shape_of
from tests.support.faults import FAULTS, inject
from tests.support.gpt import LENGTH, RULES, VOCAB, AllReduce, Gpt
from tests.support.runs import NUM_TWINS, SimulatedRank
from tests.support.transformer import Shape
from ttrace.capture.plan import Plan
from ttrace.capture.session import Session
from ttrace.layouts.rules import Rules

SHAPE = Shape(vocab=48, hidden=16, ffn=24, length=8)
HAND = Shape(vocab=VOCAB, length=LENGTH)
"""What the small GPT, whose tensor parallelism is written by hand, is trained on."""
NUM_MICROBATCHES = 3
"""Another number than any axis has ranks, so that a factor tells them apart."""

Break = Callable[[Candidate], None]


@dataclass(frozen=True)
class Fault:
    """What is broken under which layout, and what must be the first finding."""

    name: str
    layout: str
    breaks: Break
    module: str
    kind: str
    cause: str
    axis: str | None = None
    num_ranks: int = 2
    recompute: str = "none"
    num_microbatches: int = NUM_MICROBATCHES
    early: bool = False
    """Whether it is done before the session attaches."""

    @property
    def cell(self) -> Cell:
        layout = "tp" if self.layout == "hand" else self.layout
        return Cell(layout, self.num_ranks, recompute=self.recompute, num_microbatches=self.num_microbatches)


def trace_fault(fault: Fault, folder: Path, references: dict[Any, Path]) -> Traced:
    """On every rank: trace a broken candidate, and its reference unless an earlier fault had the same."""
    torch.manual_seed(0)
    cell = fault.cell
    is_by_hand = fault.layout == "hand"
    shape = HAND if is_by_hand else shape_of(cell, SHAPE)
    candidate = by_hand() if is_by_hand else LAYOUTS[cell.layout](shape, cell)
    total = cell.num_microbatches * candidate.num_data_ranks
    build: Any = {"build": whole_gpt} if is_by_hand else {}
    reference = reference_of(folder, replace(shape, recompute="none"), cell, total, references, **build)
    if fault.early:
        fault.breaks(candidate)
    out = folder / fault.name.replace(" ", "-")
    session = attached(candidate, Plan(out=out, role="candidate", reference=reference / "reference", stop=False))
    if not fault.early:
        fault.breaks(candidate)
    candidate.step(session)
    session.close()
    return Traced(reference, out)


def trace_together(faults: Sequence[Fault], folder: Path, references: dict[Any, Path]) -> tuple[Traced, Traced]:
    """On every rank: the small GPT with several faults at once, ordinarily and isolated."""
    cell = faults[0].cell
    ordinary = reference_of(folder, HAND, cell, NUM_MICROBATCHES, references, whole_gpt)
    if ordinary / "isolated" not in references.values():
        references["isolated"] = ordinary / "isolated"
        _trace_isolated(ordinary, dist.get_rank(), dist.get_world_size())
    traced = []
    for reference, isolated in ((ordinary, False), (ordinary / "isolated", True)):
        out = folder / "-".join(fault.name.replace(" ", "-") for fault in faults) / str(isolated)
        plan = Plan(out=out, role="candidate", reference=reference / "reference", isolated=isolated, stop=False)
        torch.manual_seed(0)
        candidate = by_hand()
        session = attached(candidate, plan)
        for fault in faults:
            fault.breaks(candidate)
        candidate.step(session)
        session.close()
        traced.append(Traced(reference, out))
    return traced[0], traced[1]


def _trace_isolated(ordinary: Path, rank: int, world: int) -> None:
    """The isolated reference and its twins, which the ranks make together."""
    alone = Plan(out=ordinary / "isolated" / "reference", reference=ordinary / "reference", isolated=True, stop=False)
    twin = alone.model_copy(update={"role": "twin", "reference": alone.out})
    plans = [
        twin.model_copy(update={"out": alone.out.parent / f"twin-{i}", "twin": i}) for i in range(1, NUM_TWINS + 1)
    ]
    for together in ([alone], plans):
        for plan in together[rank::world]:
            torch.manual_seed(0)
            model = Gpt()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            session = Session(plan, model, optimizer, SimulatedRank(), Rules())
            accumulated(session, model, optimizer, HAND, NUM_MICROBATCHES)
            session.close()
        dist.barrier()


def whole_gpt(_shape: Shape) -> nn.Module:
    return Gpt()


def by_hand() -> Candidate:
    """The small GPT, tensor-parallel over all ranks."""
    tp = dist.get_world_size()
    model = Gpt(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(session: Any) -> None:
        accumulated(session, model, optimizer, HAND, NUM_MICROBATCHES)

    return Candidate([model], optimizer, step, 1, {"tp": tp}, RULES)


def module_of(candidate: Candidate, name: str) -> Any:
    """A module by the name that the reference has for it; None where this rank has none."""
    for chunk in candidate.chunks:
        for path, module in chunk.named_modules():
            if path.removeprefix("module.") == name:
                return module
    return None


def parameter_of(candidate: Candidate, name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(module_of(candidate, module), leaf)


def then(candidate: Candidate, name: str, wrong: Callable[[Any], Any], *, on_rank: int | None = None) -> None:
    """What a module gives becomes something else, on all ranks or one."""
    module = module_of(candidate, name)
    if module is not None and on_rank in (None, dist.get_rank()):
        forward = module.forward
        module.forward = lambda *args, **kwargs: wrong(forward(*args, **kwargs))


def at_gradient(candidate: Candidate, name: str, wrong: Callable[[Any], Any], *, on_rank: int | None = None) -> None:
    """A parameter's gradient becomes something else as soon as it is there."""
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


def loss_not_divided(candidate: Candidate) -> None:
    """A script that sums the losses of its microbatches instead of averaging them."""
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


CATALOGUE = (
    Fault(
        "row without its sum",
        "hand",
        no_sum_in("layers.1.mlp.fc2"),
        "layers.1.mlp.fc2",
        "output",
        "missing all-reduce",
        "tp",
    ),
    Fault(
        "column without its backward sum",
        "hand",
        no_sum_in("layers.1.attention.qkv"),
        "layers.1.attention.qkv",
        "grad_input",
        "missing all-reduce",
        "tp",
    ),
    Fault("sums twice", "hand", sums_twice, "layers.2.mlp.fc1", "grad_input", "double reduction", "tp"),
    Fault("bias on every rank", "hand", bias_on_every_rank, "layers.0.mlp.fc2", "output", "bias"),
    Fault("keys for values", "hand", keys_for_values, "layers.1.attention.qkv", "output", "moved"),
    Fault("other layer's weight", "hand", other_layers_weight, "layers.2.mlp.fc1", "param", "another's values"),
    Fault("shard off by 2%", "hand", shard_off_by_percents, "layers.1.attention.qkv", "param", "some ranks"),
    Fault("left out of optimizer", "hand", left_out_of_optimizer, "layers.1.norm2", "update", "not updated"),
    Fault("in two groups", "hand", in_two_groups, "layers.1.mlp.fc2", "update", "updated twice"),
    Fault("other learning rate", "hand", other_learning_rate, "head", "update", "constant factor"),
    Fault(
        "bfloat16 matmul",
        "hand",
        weaker("layers.1.mlp.fc1", torch.bfloat16),
        "layers.1.mlp.fc1",
        "output",
        "weaker dtype",
    ),
    Fault("float16 norm", "hand", weaker("layers.2.norm2", torch.float16), "layers.2.norm2", "output", "weaker dtype"),
    Fault("overflow", "hand", overflows, "layers.1.mlp.fc1", "output", "not finite"),
    Fault("gradient detached", "hand", gradient_detached, "layers.0.attention.proj", "param_grad", "zeros"),
    Fault("read transposed", "hand", read_transposed, "layers.1.norm2", "output", "transposed"),
    Fault("wrong sign", "hand", wrong_sign, "layers.2.norm1", "output", "constant factor"),
    Fault("loss not divided", "hand", loss_not_divided, "words", "param_grad", "constant factor", "mb"),
    Fault("first rows lost", "tp", first_rows_lost, "tok", "param_grad", "some rows"),
    Fault(
        "partial sum of DTensors",
        "tp",
        unreduced("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "output",
        "missing all-reduce",
        "tp",
    ),
    Fault(
        "norm gradient not summed",
        "tp+sp",
        norm_gradient_not_summed,
        "layers.1.ffn_norm",
        "param_grad",
        "missing all-reduce",
        "tp",
    ),
    Fault("chunks exchanged", "tp+sp", chunks_exchanged, "layers.1.ffn_norm", "output", "moved"),
    Fault(
        "sliced, not scattered",
        "tp+sp",
        unreduced("layers.1.feed_forward.w2"),
        "layers.1.feed_forward.w2",
        "output",
        "missing all-reduce",
        "tp",
    ),
    Fault("positions not offset", "cp-gather", positions_not_offset, ".", "buffer", "moved"),
    Fault(
        "left out of reduction",
        "cp-ulysses",
        left_out_of_reduction("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "param_grad",
        "missing all-reduce",
        "cp",
    ),
    Fault(
        "divided twice",
        "cp-gather",
        divided_twice("layers.1.attention.wq.weight"),
        "layers.1.attention.wq",
        "param_grad",
        "constant factor",
        "cp",
    ),
    Fault("not synchronised", "ddp", not_synchronised, "tok", "param_grad", "missing average", "dp"),
    Fault(
        "summed, not averaged",
        "ddp",
        summed_not_averaged,
        "tok",
        "param_grad",
        "double reduction",
        "dp",
        num_microbatches=1,
    ),
    Fault("yesterday's data", "ddp", yesterdays_data, ".", "input", "another's values"),
    Fault("norm counts twice", "ddp", counted_twice, ".", "grad_norm", "gradient norm", "dp"),
    Fault("other max_norm", "ddp", other_max_norm, ".", "clip", "clip factor"),
    Fault(
        "recomputed otherwise",
        "ddp",
        recomputed_otherwise,
        "layers.1.ffn_norm",
        "recompute_output",
        "recompute",
        recompute="full",
    ),
    Fault("updates kept", "zero", no_sharing_of_updates, "tok", "update", "not updated"),
    Fault(
        "shard without gradient", "fsdp", shard_without_gradient, "layers.2.feed_forward.w2", "param_grad", "some ranks"
    ),
    Fault(
        "block not averaged",
        "fsdp",
        block_not_averaged,
        "layers.1.attention_norm",
        "param_grad",
        "double reduction",
        "dp",
    ),
    Fault("stale activations", "pp-1f1b", stale("layers.1"), "layers.1", "output", "another's values"),
    Fault("layer lost", "pp-gpipe", layer_lost, ".", "output", "missing modules", early=True),
    Fault("rows come back shifted", "ep", rows_come_back_shifted, "layers.2.feed_forward.experts", "output", "moved"),
    Fault("one expert lost", "ep", one_expert_lost, "layers.1.feed_forward.experts", "param_grad", "some rows"),
    Fault(
        "experts divided twice",
        "ep",
        divided_twice("layers.1.feed_forward.experts.w1"),
        "layers.1.feed_forward.experts",
        "param_grad",
        "constant factor",
        "ep",
    ),
    Fault(
        "partial sum beside fsdp",
        "fsdp+tp",
        unreduced("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "output",
        "missing all-reduce",
        "tp",
        num_ranks=4,
    ),
    Fault(
        "replica drifts",
        "hsdp",
        replica_drifts,
        "layers.2.feed_forward.w2",
        "param_grad",
        "replicas differ",
        "replicate",
        num_ranks=4,
    ),
    Fault(
        "stale beside tp",
        "pp+tp",
        stale("layers.1"),
        "layers.1",
        "output",
        "another's values",
        num_ranks=4,
    ),
)
