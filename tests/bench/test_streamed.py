"""The bench of streamed references: what it runs is traced, small in memory, and a reference for candidates."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench._candidate import DROPPED, judged_on_ranks
from bench._large import MODELS
from bench.streamed import GIB, PEAK, iteration, measure_scratch
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace

NARROW = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 16}
EXPERTS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
LOW_RANK = {"q_lora_rank": 64, "kv_lora_rank": 32, "num_key_value_heads": 16, "moe_intermediate_size": 256}


def test_a_streamed_iteration_holds_less_than_its_weights(tmp_path: Path) -> None:
    """Layers of Llama's shape, made narrow: twelve more of them cost less than half of their weights and gradients."""
    iteration("warm", MODELS["llama-8b"].cut(4, vocab=64, **NARROW), tmp_path, num_tokens=8)
    before = iteration("few", MODELS["llama-8b"].cut(4, vocab=64, **NARROW), tmp_path, num_tokens=8)
    found = iteration("llama", MODELS["llama-8b"].cut(16, vocab=64, **NARROW), tmp_path, num_tokens=8)
    weights = 2 * 2 * (found.num_parameters - before.num_parameters) / GIB
    assert weights > 0.1
    assert found.peak_gib - before.peak_gib < 0.5 * weights
    trace = Trace(tmp_path)
    assert list(trace.problems()) == []
    assert {Kind.LOSS, Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.PARAM} <= {t.kind for t in trace.shards}


def test_the_shape_of_deepseek_is_streamed_too(tmp_path: Path) -> None:
    large = MODELS["deepseek-v3"].cut(5, vocab=64, **NARROW, **EXPERTS, **LOW_RANK)
    found = iteration("deepseek", large, tmp_path, num_tokens=8)
    assert found.num_layers == 5
    assert found.loss == pytest.approx(4.16, abs=0.5)  # the logarithm of 64


@pytest.mark.nightly
def test_four_layers_as_wide_as_the_real_ones_fit(tmp_path: Path) -> None:
    """Their weights and gradients alone take more; most of what is used here are the vocabulary's."""
    large = MODELS["llama-8b"].cut(4)
    found = iteration("llama-8b", large, tmp_path)
    assert 2 * 2 * found.num_parameters / GIB > 7
    assert found.peak_gib - measure_scratch(large) < PEAK
    assert found.num_used < found.num_parameters  # rows of the embedding that no token has
    assert found.trace_mib / 1024 < 0.01 * found.full_gib


@pytest.mark.slow
def test_a_tensor_parallel_candidate_is_judged_against_a_streamed_reference(tmp_path: Path) -> None:
    large = MODELS["llama-8b"].cut(2, vocab=96, hidden_size=128, intermediate_size=448, num_attention_heads=16)
    found = judged_on_ranks(large, tmp_path)
    assert found["clean"].exit is Exit.PASSED
    assert found["wrong"].exit is Exit.FOUND
    [finding] = found["wrong"].findings
    assert finding.module == DROPPED
    assert "missing all-reduce over tp" in finding.cause.sentence
