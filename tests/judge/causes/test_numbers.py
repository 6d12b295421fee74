"""Wrong integers lead and describe how they differ; values of a weaker dtype name it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.verdict import Cause, CauseName, Finding, Judgement
from ttrace.report.facts import list_facts

FULL = draw_tensor(8, 12)
POSITIONS = torch.arange(16)


def positioned(folder: Path, theirs: torch.Tensor) -> Judgement:
    """A model whose own code makes positions and gives them to its blocks; each of two ranks has half of them."""
    case = Case(folder, "cp=2")

    def add(name: str, *, wrong: bool) -> None:
        full = draw_tensor(16, 4, seed=len(name))
        case.add(name, full, "t/cp d", lambda x: x + draw_tensor(16, 4, seed=7) if wrong else x)

    add("0/0/./input", wrong=False)
    add("0/0/blocks.0/input", wrong=False)
    case.add("0/0/blocks.0/input.1", POSITIONS, "t/cp", lambda _: theirs)
    for name in ("blocks.0/output", "blocks.1/input"):
        add(f"0/0/{name}", wrong=True)
    case.add("0/0/blocks.1/input.1", POSITIONS, "t/cp", lambda _: theirs)
    for name in ("blocks.1/output", "./output", "./loss", "blocks.1/grad_output"):
        add(f"0/0/{name}", wrong=True)
    return case.judge()


def shown(finding: Finding) -> dict[str, str]:
    return dict(list_facts(finding, ()))


def test_the_earliest_wrong_tensor_leads_where_it_is_of_integers(tmp_path: Path) -> None:
    judgement = positioned(tmp_path, torch.cat([POSITIONS[:8], POSITIONS[8:] - 1]))
    first = judgement.findings[0]
    assert str(first.comparison.id) == "0/0/blocks.0/input.1"
    assert first.module == "."  # its code made them
    assert first.cause.sentence == "integers differ by a constant; rank 1: reference - 1"
    assert shown(first)["error"] == "differs in 8 of 16 elements"
    assert "0/0/./output" not in {str(finding.comparison.id) for finding in judgement.findings}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (POSITIONS + 3, "all ranks: reference + 3"),
        (POSITIONS % 8, "rank 1: reference - 8"),
        (torch.cat([POSITIONS[:8] + 1, POSITIONS[8:] - 1]), "rank 0: reference + 1, rank 1: reference - 1"),
    ],
)
def test_a_constant_difference_is_told_by_rank(tmp_path: Path, theirs: torch.Tensor, words: str) -> None:
    cause = positioned(tmp_path, theirs).findings[0].cause
    assert (cause.name, cause.sentence) == (CauseName.OFFSET, f"integers differ by a constant; {words}")


def test_other_differences_are_not_called_constant(tmp_path: Path) -> None:
    for number, theirs in enumerate((2 * POSITIONS, POSITIONS.flip(0))):
        first = positioned(tmp_path / str(number), theirs).findings[0]
        assert str(first.comparison.id) == "0/0/blocks.0/input.1"
        assert first.cause.name != CauseName.OFFSET
        assert "tolerance" not in shown(first)["error"]


def test_other_data_says_how_many_of_its_integers_differ(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.add("0/0/./batch.0", POSITIONS, "a", lambda x: x.index_fill(0, torch.tensor([3, 5]), 99))
    assert any("they differ in 2 of 16 elements" in problem for problem in case.judge().problems)


def test_replicas_of_integers_that_differ_are_counted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.add_trusted("0/0/fc/output.1", POSITIONS)
    for rank in (0, 1):
        case.candidate.record(rank, "0/0/fc/output.1", POSITIONS + rank * (POSITIONS > 12), "a")
    [finding] = case.judge().findings
    assert shown(finding)["error"] == "differs between replicas in 3 of 16 elements"


def test_a_count_that_differs_is_named_with_both_numbers(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/./batch.labels", torch.arange(8))
    case.add("0/0/./input.num_items_in_batch", torch.tensor(174), change=lambda x: x + 7)
    case.add("0/0/./loss", torch.tensor(2.0), change=lambda x: x * 174 / 181)
    [finding, *_] = case.judge().findings
    assert finding.comparison.id.site.slot == "num_items_in_batch"
    assert finding.cause.name is CauseName.COUNT
    assert finding.cause.sentence.endswith("the candidate comes to 181, the reference to 174")


def find_cause(folder: Path, full: torch.Tensor, wrong: torch.Tensor) -> Cause:
    case = Case(folder)
    case.add("0/1/layers.1.fc/output", full, "a b/tp", lambda _: wrong)
    return case.judge().findings[0].cause


@pytest.mark.parametrize("weak", [torch.bfloat16, torch.float16])
def test_values_of_a_weaker_dtype_name_it(tmp_path: Path, weak: torch.dtype) -> None:
    found = find_cause(tmp_path, FULL, FULL.to(weak).float())
    name = str(weak).removeprefix("torch.")
    assert found.name == CauseName.WEAKER_DTYPE
    assert found.sentence == f"the candidate computes in {name} where the reference has float32"
    assert found.evidence[0].startswith(f"every value fits {name}, and the error is ")


def test_a_parameter_held_in_a_weaker_dtype_names_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/-/fc.weight/param", FULL, "a b/tp", lambda x: x.bfloat16())
    assert case.judge().findings[0].cause.sentence == "the candidate holds bfloat16 where the reference has float32"


@pytest.mark.parametrize(
    ("full", "wrong"),
    [
        (FULL, nudge(FULL, 1e-3)),
        (FULL, (FULL + draw_tensor(8, 12, seed=4)).bfloat16().float()),
        (FULL.bfloat16().float(), (FULL.bfloat16() * 1.01).float()),
    ],
    ids=["off by as much", "off by more", "not rounded"],
)
def test_what_a_dtype_does_not_explain_is_not_claimed(tmp_path: Path, full: torch.Tensor, wrong: torch.Tensor) -> None:
    found = find_cause(tmp_path, full, wrong)
    assert found.name != CauseName.WEAKER_DTYPE
