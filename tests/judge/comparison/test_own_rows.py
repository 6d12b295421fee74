"""A value that each data-parallel rank has of its own rows is judged as an average or a sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.reason import Reason
from ttrace.judge.verdict import Exit, Verdict

LOSS = "0/0/./output.loss"


def case_of(folder: Path, rows: list[torch.Tensor], whole: torch.Tensor, mesh: str = "dp=2") -> Case:
    case = Case(folder, mesh, batch_axes=("dp",))
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    case.add_trusted(LOSS, whole)
    for rank, value in enumerate(rows):
        case.candidate.record(rank, LOSS, value)
    return case


@pytest.mark.parametrize(("factor", "word"), [(0.5, "average"), (1.0, "sum")])
def test_the_average_or_sum_of_all_ranks_is_right(tmp_path: Path, factor: float, word: str) -> None:
    rows = [torch.tensor(3.0), torch.tensor(5.0)]
    judgement = case_of(tmp_path, rows, factor * (rows[0] + rows[1])).judge()
    comparison = find_comparison(judgement, LOSS)
    assert (comparison.verdict, comparison.layout) == (Verdict.PASS, f"{word} over dp")
    assert judgement.exit is Exit.PASSED


def test_another_function_of_own_rows_is_left_to_what_follows_from_it(tmp_path: Path) -> None:
    judgement = case_of(tmp_path, [torch.tensor(3.0), torch.tensor(5.0)], torch.tensor(4.5)).judge()
    comparison = find_comparison(judgement, LOSS)
    assert (comparison.verdict, comparison.reason) == (Verdict.UNJUDGED, Reason.OWN_ROWS)
    assert judgement.exit is Exit.PASSED


def test_a_single_rank_that_is_off_is_accused(tmp_path: Path) -> None:
    judgement = case_of(tmp_path, [torch.tensor(3.0), torch.tensor(5.0)], torch.tensor(3.0)).judge()
    assert judgement.exit is Exit.FOUND


def test_ranks_with_the_same_rows_must_agree(tmp_path: Path) -> None:
    rows = [torch.tensor(value) for value in (3.0, 3.5, 5.0, 5.0)]
    judgement = case_of(tmp_path, rows, torch.tensor(4.0), "dp=2 tp=2").judge()
    assert find_comparison(judgement, LOSS).verdict is Verdict.CONFLICT


def test_without_a_divided_batch_replicas_must_agree(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    case.add_trusted(LOSS, torch.tensor(4.0))
    for rank in range(2):
        case.candidate.record(rank, LOSS, torch.tensor(3.0 + 2 * rank))
    assert case.judge().exit is Exit.FOUND


def test_gradients_of_what_all_ranks_share_are_summed(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2", batch_axes=("dp",), grad_factor=0.5)
    case.add("0/0/fc/output", draw_tensor(8, 4), "a/dp b")
    whole = draw_tensor(6, 4, seed=3)
    case.add_trusted("0/0/position/grad_output", whole)
    case.candidate.record(0, "0/0/position/grad_output", 2 * whole * 0.25)
    case.candidate.record(1, "0/0/position/grad_output", 2 * whole * 0.75)
    comparison = find_comparison(case.judge(), "0/0/position/grad_output")
    assert (comparison.verdict, comparison.layout) == (Verdict.PASS, "d0 d1 +dp")
