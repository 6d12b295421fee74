"""The how-to page's own lines, each run as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ttrace
from tests.support.streamed_runs import VOCAB
from ttrace.attach import PLAN_VARIABLE
from ttrace.capture.plan import Plan
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.hugging import CONFIGS
from zoo.harness.ranks import on_ranks


def a_config() -> tuple[Any, Any]:
    import transformers

    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**CONFIGS["llama"] | {"tie_word_embeddings": False})


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Plan(out=folder / "trace", stop=False).save(folder / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(folder / "plan.json"))


def kinds(folder: Path) -> set[Kind]:
    trace = Trace(folder / "trace")
    assert list(trace.problems()) == []
    return {tensor_id.kind for tensor_id in trace.shards}


def test_the_streamed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path, monkeypatch)
    LlamaForCausalLM, config = a_config()  # noqa: N806
    ids = labels = torch.randint(VOCAB, (2, 16))
    model = ttrace.streamed(lambda: LlamaForCausalLM(config).to(torch.bfloat16))
    session = ttrace.attach(model)
    with session.step():
        batch = session.batch({"input_ids": ids, "labels": labels})
        model(**batch).loss.backward()
    assert {Kind.LOSS, Kind.PARAM_GRAD} <= kinds(tmp_path)


def in_stages(num_microbatches: int) -> None:
    from ttrace.large_references.pipelined import GPipe, pipelined

    LlamaForCausalLM, config = a_config()  # noqa: N806
    tokens = torch.randint(VOCAB, (2, 16))
    microbatches = [{"input_ids": tokens, "labels": tokens}] * num_microbatches

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    stage = pipelined(lambda: LlamaForCausalLM(config))
    session = ttrace.attach(stage, mesh={"pp": dist.get_world_size()})
    pipeline = GPipe(stage, loss, num_microbatches)
    with session.step():
        batches = [session.batch(batch) for batch in microbatches]
        ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
        pipeline.step(input_ids=ids, target=labels)


@pytest.mark.slow
def test_the_pipelined_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path, monkeypatch)
    on_ranks(2, in_stages, 2)
    assert {Kind.LOSS, Kind.PARAM_GRAD} <= kinds(tmp_path)
