"""A pipelined reference is that of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.streamed_runs import BATCH, BF16, FP32, LENGTH, VOCAB, assert_same_bits, hugging, traced
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError
from ttrace.large_references.pipelined import GPipe, pipelined
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks

NUM_STAGES, NUM_MICROBATCHES = 2, 3
CASES = [("llama", FP32), ("llama", BF16), ("gpt2", FP32), ("qwen3_moe", BF16)]


def built(family: str, dtype: torch.dtype) -> nn.Module:
    return hugging(family, dtype, tied=False)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def in_stages(folder: Path) -> None:
    """On every rank: all cases, one after the other."""
    from ttrace.adapters.native.adapter import Native

    for number, case in enumerate(CASES):
        stage = pipelined(partial(built, *case))
        plan = Plan(out=folder / str(number), stop=False)
        session = TracingSession(SessionParts(plan, stage, None, Native([stage], mesh={"pp": NUM_STAGES})))
        pipeline = GPipe(stage, token_loss, NUM_MICROBATCHES)
        with session.step():
            batches = [session.batch(data()) for _ in range(NUM_MICROBATCHES)]
            ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
            pipeline.step(input_ids=ids, target=labels)


def data() -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": labels}


def in_one_process(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


@pytest.mark.slow
def test_pipelined_is_the_reference_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    on_ranks(NUM_STAGES, in_stages, tmp_path)
    for number, case in enumerate(CASES):
        plan = Plan(out=tmp_path / f"one-{number}", role="candidate", reference=tmp_path / str(number), stop=False)
        one = traced(plan, built(*case), in_one_process, num_microbatches=NUM_MICROBATCHES)
        stages = Trace(tmp_path / str(number))
        assert_same_bits(stages, one)
        assert all(len(rank.manifest.parameters) < len(one.manifest.parameters) for rank in stages.ranks)
        assert {Kind.LOSS, Kind.PARAM_GRAD, Kind.GRAD_INPUT} <= {t.kind for t in stages.shards}


def stage_of(number: int, build: Callable[[], nn.Module]) -> set[str]:
    return {name for name, _ in pipelined(build, stage=number, num_stages=2).named_parameters()}


def test_each_stage_has_its_share() -> None:
    whole = {name for name, _ in built("llama", FP32).named_parameters()}
    first, last = (stage_of(number, partial(built, "llama", FP32)) for number in (0, 1))
    assert first | last == whole
    assert not first & last
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"} <= first
    assert {"model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"} <= last


def test_misuse_is_refused_in_words() -> None:
    with pytest.raises(
        CaptureError, match=r"lm_head.weight is tied to model.embed_tokens.weight: each stage would have a copy"
    ):
        stage_of(0, partial(hugging, "llama", FP32, tied=True))
    with pytest.raises(CaptureError, match="no list of modules"):
        stage_of(0, lambda: nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="has only 2 blocks for 3 stages"):
        pipelined(partial(built, "llama", FP32), stage=0, num_stages=3)
