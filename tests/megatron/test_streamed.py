"""A streamed megatron-core GPT is the ordinary one, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.megatron_cases import BF16, gpt
from tests.support.streamed_runs import LENGTH, VOCAB, assert_same_bits, trace_both
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.runtime import on_megatron

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

CASES = [
    gpt(layers=2, vocab=VOCAB, length=LENGTH, tied=tied, dtype=dtype)
    for tied in (True, False)
    for dtype in ("float32", BF16)
]


def bare(case: Case) -> nn.Module:
    """The model itself: its wrappers would have memory for every gradient."""
    from megatron.core.models.gpt import GPTModel

    from zoo.harness.megatron import versions
    from zoo.harness.megatron.config import layer_spec, transformer_config

    config: Any = transformer_config(case)
    model: nn.Module = versions.call(
        GPTModel,
        config=config,
        transformer_layer_spec=layer_spec(case, config, None),
        vocab_size=case.vocab,
        max_sequence_length=case.length,
        share_embeddings_and_output_weights=case.tied,
    )
    return model.to(torch.bfloat16) if case.dtype == BF16 else model


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    places = torch.arange(LENGTH).expand_as(batch["input_ids"])
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    losses: torch.Tensor = model(batch["input_ids"], places, mask, labels=batch["labels"])
    return losses.float().mean()


def compared(cases: list[Case], folder: Path) -> list[str]:
    """On one rank: each case, streamed and ordinary; what differs."""
    import ttrace
    from ttrace.adapters.megatron.adapter import Megatron
    from zoo.harness.megatron.models import parallel

    def adapted(chunks: list[nn.Module]) -> Megatron:
        return Megatron(chunks, None)

    wrong = []
    for case in cases:
        with parallel(case):
            streamed, ordinary = ttrace.streamed(partial(bare, case)), bare(case)
            try:
                assert_same_bits(*trace_both(folder / case.name, streamed, ordinary, loss, adapting=adapted))
            except AssertionError as error:
                wrong.append(f"{case.name}: {error}")
    return wrong


def test_streamed_is_the_ordinary_reference_bit_for_bit(tmp_path: Path) -> None:
    assert on_megatron(1, compared, CASES, tmp_path) == [[]]
