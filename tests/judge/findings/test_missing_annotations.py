"""What a correct candidate does but nobody stated is neither accused nor passed silently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.sentences import describe
from ttrace.judge.verdict import CauseName, Comparison, Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind
from ttrace.layouts.source import INFERRED


def partial_sums(case: Case, name: str, full: torch.Tensor) -> None:
    """Every rank of tp=2 holds a part of the sum, and nobody says so."""
    part = draw_tensor(*full.shape, seed=7)
    case.reference.record(0, name, full, "a b")
    case.twin.record(0, name, full * (1 + 1e-7), "a b")
    for rank, local in enumerate((part, full - part)):
        case.candidate.record(rank, name, local)


def test_a_sum_that_the_parent_finishes_asks_for_a_rule(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/attn.proj/output", draw_tensor(4, 8))
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=1))
    case.add("0/-/attn.qkv.weight/param", draw_tensor(4, 8, seed=2), "a/tp b")
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert not judgement.findings
    site = next(c for c in judgement.comparisons if c.id.name == "attn.proj")
    assert site.verdict is Verdict.UNJUDGED
    assert site.by == INFERRED
    assert describe(site.why).endswith('add the rule "attn.proj/output": "... +tp"')


def test_a_sum_that_nobody_finishes_is_a_missing_all_reduce(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/attn.proj/output", draw_tensor(4, 8))
    partial_sums(case, "0/0/attn/output", draw_tensor(4, 8))
    case.add("0/-/attn.qkv.weight/param", draw_tensor(4, 8, seed=2), "a/tp b")
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].cause.name == CauseName.MISSING_ALL_REDUCE


def test_a_factor_that_averaging_will_apply_asks_to_be_stated(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    for name in ("0/0/fc/grad_output", "0/0/fc/grad_input"):
        case.add(name, draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.UNJUDGED
    assert any("attach(grad_factor=0.5)" in problem for problem in judgement.problems)


def test_a_factor_that_reaches_final_gradients_is_a_finding(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/grad_output", draw_tensor(4, 8), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8), change=lambda x: 2 * x)
    assert case.judge().exit is Exit.FOUND


def test_a_factor_at_some_sites_only_is_not_still_to_come(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/grad_output", draw_tensor(4, 8), "a/dp b")
    case.add("0/0/fc/grad_input", draw_tensor(4, 8, seed=1), "a/dp b", lambda x: 2 * x)
    case.add("0/0/fc/output", draw_tensor(4, 8), "a/dp b")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].cause.sentence.startswith("the candidate is 2 x the reference: scaled by dp (dp=2)")


@pytest.mark.parametrize("is_reduced", [True, False])
def test_what_microbatches_add_is_accused_only_if_nobody_reduces_it(tmp_path: Path, is_reduced: bool) -> None:
    """A wrong final gradient that all ranks have tells its own story: here the first microbatch counted twice."""
    case, parts = Case(tmp_path, "tp=2"), [draw_tensor(4, 8, seed=seed) for seed in (1, 2)]
    for mb, part in enumerate(parts):
        partial_sums(case, f"0/{mb}/norm.weight/param_grad", part)
    if is_reduced:
        case.add("0/-/norm.weight/param_grad", parts[0] + parts[1], change=lambda _: 2 * parts[0] + parts[1])
    else:
        partial_sums(case, "0/-/norm.weight/param_grad", parts[0] + parts[1])
    finding = case.judge().findings[0]
    assert (finding.comparison.id.microbatch is None) == is_reduced
    assert finding.cause.name == (CauseName.MICROBATCHES if is_reduced else CauseName.MISSING_ALL_REDUCE)


def test_an_unexplained_error_names_the_cuts_that_were_only_inferred(tmp_path: Path) -> None:
    """A fused weight whose parts are cut one by one is taken for one that is cut in blocks."""
    case = Case(tmp_path, "tp=2")
    weight = draw_tensor(8, 4, seed=2)
    case.add_trusted("0/-/attn.qkv.weight/param", weight)
    for rank in range(2):
        case.candidate.record(rank, "0/-/attn.qkv.weight/param", weight.chunk(2)[rank].contiguous())
    case.add("0/0/attn/output", draw_tensor(4, 8, seed=1), "a b", lambda x: x + 0.3 * draw_tensor(4, 8, seed=5))
    [finding] = case.judge().findings
    assert finding.cause.name is CauseName.UNEXPLAINED
    assert "inferred from their shapes: attn.qkv.weight (d0/tp d1)" in finding.cause.evidence[-1]
    assert "fused(3)" in finding.cause.evidence[-1]


def call_of(judgement: Judgement) -> Comparison:
    return next(c for c in judgement.comparisons if c.id.kind is Kind.CALL)


def test_a_result_before_a_collective_is_not_accused(tmp_path: Path) -> None:
    """A bias that each rank adds before the sum: the output is wrong, and what was summed is only partial."""
    case, bias = Case(tmp_path, "tp=2"), draw_tensor(8, seed=5)
    partial_sums(case, "0/0/proj/call.clone.0", draw_tensor(4, 8) + 2 * bias)
    case.add("0/0/proj/output", draw_tensor(4, 8), change=lambda x: x + bias)
    judgement = case.judge()
    assert call_of(judgement).verdict is Verdict.UNJUDGED
    assert judgement.findings


def test_a_partial_result_whose_sum_is_missing_is_not_accused(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    partial_sums(case, "0/0/proj/call.linear.0", draw_tensor(4, 8))
    partial_sums(case, "0/0/proj/output", draw_tensor(4, 8))
    judgement = case.judge()
    assert call_of(judgement).verdict is Verdict.UNJUDGED
    assert judgement.findings[0].cause.name == CauseName.MISSING_ALL_REDUCE


def test_a_result_that_differs_like_the_output_is_accused(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    for name in ("0/0/proj/call.gelu.0", "0/0/proj/output"):
        case.add_trusted(name, draw_tensor(4, 8))
        for rank in range(2):
            case.candidate.record(rank, name, draw_tensor(4, 8) + rank * draw_tensor(4, 8, seed=9), "...")
    assert call_of(case.judge()).verdict is Verdict.CONFLICT
