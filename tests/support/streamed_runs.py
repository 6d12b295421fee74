"""Traces of one step of a model, streamed and ordinary, and their comparison bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.trace.reader import Trace
from zoo.harness.hugging import CONFIGS

VOCAB, LENGTH, BATCH = 48, 8, 2
FP32, BF16 = torch.float32, torch.bfloat16
Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that transformers models compute."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def traced(
    plan: Plan,
    model: nn.Module,
    loss: Loss = own_loss,
    *,
    num_microbatches: int = 1,
    adapting: Callable[[list[nn.Module]], Adapter] = Native,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trace:
    """Trace one step; the data are generated, so that both runs have the same."""
    session = TracingSession(SessionParts(plan, model, optimizer, adapting([model])))
    with session.step():
        for _ in range(num_microbatches):
            ids, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
            batch = session.batch({"input_ids": ids, "labels": labels})
            (loss(model, batch) / num_microbatches).backward()
        if optimizer is not None:
            optimizer.step()
    return Trace(plan.out)


def trace_both(
    folder: Path, streamed: nn.Module, ordinary: nn.Module, *args: Any, **settings: Any
) -> tuple[Trace, Trace]:
    """Trace a streamed reference, and an ordinary run of the same model on the same generated parameters."""
    reference = traced(Plan(out=folder / "streamed", stop=False), streamed, *args, **settings)
    plan = Plan(out=folder / "ordinary", role="candidate", reference=folder / "streamed", stop=False)
    return reference, traced(plan, ordinary, *args, **settings)


def assert_same_bits(a: Trace, b: Trace) -> None:
    """Check that every id, dtype and element agrees, and that there is no gap, overlap or problem."""
    assert [*a.problems(), *b.problems()] == []
    assert set(a.shards) == set(b.shards)
    for tensor_id in a.shards:
        x, y = LogicalTensor.of(a, tensor_id), LogicalTensor.of(b, tensor_id)
        assert x is not None
        assert y is not None
        cover = x.coverage()
        assert not cover.num_gap, tensor_id
        assert not cover.num_overlap, tensor_id
        assert x.dtype == y.dtype, tensor_id
        assert torch.equal(x.tensor(), y.tensor()), tensor_id


def hugging(family: str, dtype: torch.dtype, *, tied: bool, **others: Any) -> nn.Module:
    """Build a small transformers model whose experts run one by one."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # it has no types
    settings = CONFIGS[family] | {"tie_word_embeddings": tied, "num_experts": 8} | others
    config = transformers.AutoConfig.for_model(family, **settings)
    model: nn.Module = auto.from_config(config, dtype=dtype, experts_implementation="eager")
    return model
