"""Catalogue of faults as they happen in distributed training, each with the finding that TTrace must report.

zoo/harness/breaking.py breaks the candidates: after the session is attached, or before if the model itself changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.verdict import CauseName
from ttrace.layouts.rules import Rules
from zoo.harness.breaking import (
    NUM_MICROBATCHES,
    Break,
    bias_on_every_rank,
    block_not_averaged,
    chunks_exchanged,
    counted_twice,
    divided_twice,
    first_rows_lost,
    gradient_detached,
    in_two_groups,
    keys_for_values,
    layer_lost,
    left_out_of_optimizer,
    left_out_of_reduction,
    no_sharing_of_updates,
    no_sum_in,
    norm_gradient_not_summed,
    not_divided,
    not_synchronised,
    one_expert_lost,
    other_layers_weight,
    other_learning_rate,
    other_max_norm,
    overflows,
    positions_not_offset,
    read_transposed,
    recomputed_otherwise,
    replica_drifts,
    rows_come_back_shifted,
    shard_off_by_percents,
    shard_without_gradient,
    stale,
    summed_not_averaged,
    sums_twice,
    unreduced,
    weaker,
    wrong_sign,
    yesterdays_data,
)
from zoo.harness.candidate import Cell, accumulated
from zoo.harness.cells import Traced, attached, reference_of
from zoo.harness.gpt import Gpt
from zoo.harness.runs import NUM_TWINS, SimulatedRank
from zoo.harness.small import HAND, by_hand, small, whole_gpt


@dataclass(frozen=True)
class Fault:
    """A fault under a layout, and the first finding that it must give."""

    name: str
    layout: str
    breaks: Break
    module: str
    kind: str
    cause: CauseName
    axis: str | None = None
    num_ranks: int = 2
    recompute: str = "none"
    num_microbatches: int = NUM_MICROBATCHES
    early: bool = False
    """Whether the candidate is broken before the session is attached."""

    @property
    def cell(self) -> Cell:
        layout = "tp" if self.layout == "hand" else self.layout
        return Cell(layout, self.num_ranks, recompute=self.recompute, num_microbatches=self.num_microbatches)


def trace_fault(fault: Fault, folder: Path, references: dict[Any, Path]) -> Traced:
    """Trace a broken candidate, and its reference unless an earlier fault had the same; call this on every rank."""
    out = folder / fault.name.replace(" ", "-")
    settings: dict[str, Any] = {"recompute": fault.recompute, "num_microbatches": fault.num_microbatches}
    case = small(fault.layout, fault.num_ranks, **settings)
    return case.trace(out, references, fault.breaks, is_early=fault.early)


def trace_together(faults: Sequence[Fault], folder: Path, references: dict[Any, Path]) -> tuple[Traced, Traced]:
    """Trace the small GPT with several faults at once, ordinarily and isolated; call this on every rank."""
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
        candidate = by_hand(HAND, cell)
        session = attached(candidate, plan)
        for fault in faults:
            fault.breaks(candidate)
        candidate.step(session)
        session.close()
        traced.append(Traced(reference, out))
    return traced[0], traced[1]


def _trace_isolated(ordinary: Path, rank: int, world: int) -> None:
    """Trace the isolated reference and its twins; the ranks divide them among themselves."""
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
            session = TracingSession(plan, model, optimizer, SimulatedRank(), Rules())
            accumulated(session, model, optimizer, HAND, NUM_MICROBATCHES)
            session.close()
        dist.barrier()


CATALOGUE = (
    Fault(
        "row without its sum",
        "hand",
        no_sum_in("layers.1.mlp.fc2"),
        "layers.1.mlp.fc2",
        "output",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
    ),
    Fault(
        "column without its backward sum",
        "hand",
        no_sum_in("layers.1.attention.qkv"),
        "layers.1.attention.qkv",
        "grad_input",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
    ),
    Fault("sums twice", "hand", sums_twice, "layers.2.mlp.fc1", "grad_input", CauseName.DOUBLE_REDUCTION, "tp"),
    Fault("bias on every rank", "hand", bias_on_every_rank, "layers.0.mlp.fc2", "output", CauseName.BIAS),
    Fault("keys for values", "hand", keys_for_values, "layers.1.attention.qkv", "output", CauseName.MOVED),
    Fault("other layer's weight", "hand", other_layers_weight, "layers.2.mlp.fc1", "param", CauseName.OTHERS_VALUES),
    Fault("shard off by 2%", "hand", shard_off_by_percents, "layers.1.attention.qkv", "param", CauseName.SOME_RANKS),
    Fault("left out of optimizer", "hand", left_out_of_optimizer, "layers.1.norm2", "update", CauseName.NOT_UPDATED),
    Fault("in two groups", "hand", in_two_groups, "layers.1.mlp.fc2", "update", CauseName.UPDATED_TWICE),
    Fault("other learning rate", "hand", other_learning_rate, "head", "update", CauseName.OPTIMIZER_SETTINGS),
    Fault(
        "bfloat16 matmul",
        "hand",
        weaker("layers.1.mlp.fc1", torch.bfloat16),
        "layers.1.mlp.fc1",
        "output",
        CauseName.WEAKER_DTYPE,
    ),
    Fault(
        "float16 norm",
        "hand",
        weaker("layers.2.norm2", torch.float16),
        "layers.2.norm2",
        "output",
        CauseName.WEAKER_DTYPE,
    ),
    Fault("overflow", "hand", overflows, "layers.1.mlp.fc1", "output", CauseName.NOT_FINITE),
    Fault("gradient detached", "hand", gradient_detached, "layers.0.attention.proj", "param_grad", CauseName.ZEROS),
    Fault("read transposed", "hand", read_transposed, "layers.1.norm2", "output", CauseName.TRANSPOSED),
    Fault("wrong sign", "hand", wrong_sign, "layers.2.norm1", "output", CauseName.CONSTANT_FACTOR),
    Fault("microbatches not averaged", "hand", not_divided, "words", "param_grad", CauseName.CONSTANT_FACTOR, "mb"),
    Fault("first rows lost", "tp", first_rows_lost, "tok", "param_grad", CauseName.SOME_ROWS),
    Fault(
        "partial sum of DTensors",
        "tp",
        unreduced("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "output",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
    ),
    Fault(
        "norm gradient not summed",
        "tp+sp",
        norm_gradient_not_summed,
        "layers.1.ffn_norm",
        "param_grad",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
    ),
    Fault("chunks exchanged", "tp+sp", chunks_exchanged, "layers.1.ffn_norm", "output", CauseName.MOVED),
    Fault(
        "sliced, not scattered",
        "tp+sp",
        unreduced("layers.1.feed_forward.w2"),
        "layers.1.feed_forward.w2",
        "output",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
    ),
    Fault("positions not offset", "cp-gather", positions_not_offset, ".", "buffer", CauseName.MOVED),
    Fault(
        "left out of reduction",
        "cp-ulysses",
        left_out_of_reduction("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "param_grad",
        CauseName.MISSING_ALL_REDUCE,
        "cp",
    ),
    Fault(
        "divided twice",
        "cp-gather",
        divided_twice("layers.1.attention.wq.weight"),
        "layers.1.attention.wq",
        "param_grad",
        CauseName.CONSTANT_FACTOR,
        "cp",
    ),
    Fault("not synchronised", "ddp", not_synchronised, "tok", "param_grad", CauseName.MISSING_AVERAGE, "dp"),
    Fault(
        "summed, not averaged",
        "ddp",
        summed_not_averaged,
        "tok",
        "param_grad",
        CauseName.DOUBLE_REDUCTION,
        "dp",
        num_microbatches=1,
    ),
    Fault("yesterday's data", "ddp", yesterdays_data, ".", "input", CauseName.OTHERS_VALUES),
    Fault("norm counts twice", "ddp", counted_twice, ".", "grad_norm", CauseName.GRADIENT_NORM, "dp"),
    Fault("other max_norm", "ddp", other_max_norm, ".", "clip", CauseName.CLIP_FACTOR),
    Fault(
        "recomputed otherwise",
        "ddp",
        recomputed_otherwise,
        "layers.1.ffn_norm",
        "recompute_output",
        CauseName.RECOMPUTE,
        recompute="full",
    ),
    Fault("updates kept", "zero", no_sharing_of_updates, "tok", "update", CauseName.NOT_UPDATED),
    Fault(
        "shard without gradient",
        "fsdp",
        shard_without_gradient,
        "layers.2.feed_forward.w2",
        "param_grad",
        CauseName.SOME_RANKS,
    ),
    Fault(
        "block not averaged",
        "fsdp",
        block_not_averaged,
        "layers.1.attention_norm",
        "param_grad",
        CauseName.DOUBLE_REDUCTION,
        "dp",
    ),
    Fault("stale activations", "pp-1f1b", stale("layers.1"), "layers.1", "output", CauseName.OTHERS_VALUES),
    Fault("layer lost", "pp-gpipe", layer_lost, ".", "output", CauseName.MISSING_MODULES, early=True),
    Fault(
        "rows come back shifted",
        "ep",
        rows_come_back_shifted,
        "layers.2.feed_forward.experts",
        "output",
        CauseName.MOVED,
    ),
    Fault("one expert lost", "ep", one_expert_lost, "layers.1.feed_forward.experts", "param_grad", CauseName.SOME_ROWS),
    Fault(
        "experts divided twice",
        "ep",
        divided_twice("layers.1.feed_forward.experts.w1"),
        "layers.1.feed_forward.experts",
        "param_grad",
        CauseName.CONSTANT_FACTOR,
        "ep",
    ),
    Fault(
        "partial sum beside fsdp",
        "fsdp+tp",
        unreduced("layers.2.attention.wo"),
        "layers.2.attention.wo",
        "output",
        CauseName.MISSING_ALL_REDUCE,
        "tp",
        num_ranks=4,
    ),
    Fault(
        "replica drifts",
        "hsdp",
        replica_drifts,
        "layers.2.feed_forward.w2",
        "param_grad",
        CauseName.REPLICAS_DIFFER,
        "replicate",
        num_ranks=4,
    ),
    Fault(
        "stale beside tp",
        "pp+tp",
        stale("layers.1"),
        "layers.1",
        "output",
        CauseName.OTHERS_VALUES,
        num_ranks=4,
    ),
)
