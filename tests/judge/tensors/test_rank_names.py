"""Ranks and microbatches are named by what they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.traces import Case, draw_tensor
from ttrace.judge.tensors.rank_names import enumerate_few, name_by_axis, name_ranks
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.mesh import Mesh

MESH = Mesh.of(dp=2, tp=4)


def cause_of(tmp_path: Path, wrong: set[int], count: int = 4, *, factor: float | None = None, dp: int = 2) -> Cause:
    """Microbatches run by the ranks of dp in turns, of which some are wrong."""
    case = Case(tmp_path, f"dp={dp}")
    for microbatch in range(count):
        full = draw_tensor(4, 8, seed=microbatch)
        case.add_trusted(f"0/{microbatch}/fc/output", full)
        bad = full + draw_tensor(4, 8, seed=50 + microbatch) if factor is None else factor * full
        local = bad if microbatch in wrong else full
        case.candidate.record(microbatch % dp, f"0/{microbatch}/fc/output", local, "...")
    return case.judge().findings[0].cause


def test_wrong_microbatches_are_those_of_a_rank(tmp_path: Path) -> None:
    cause = cause_of(tmp_path, {1, 3})
    assert cause.sentence == "only microbatches 1 and 3 are wrong: those of dp rank 1"
    assert (cause.name, cause.axis) == (CauseName.SOME_RANKS, "dp")


def test_a_known_cause_stays_and_has_them_as_evidence(tmp_path: Path) -> None:
    cause = cause_of(tmp_path, {0, 2}, factor=3.0)
    assert cause.sentence == "the candidate is 3 x the reference"
    assert cause.evidence[-1] == "only microbatches 0 and 2 are wrong: those of dp rank 0"


def test_many_microbatches_are_not_listed(tmp_path: Path) -> None:
    assert cause_of(tmp_path, set(range(1, 16, 2)), 16).sentence == "only the 8 microbatches of dp rank 1 are wrong"


def test_one_microbatch_is_named_with_its_rank(tmp_path: Path) -> None:
    words = "only microbatch 2 is wrong: that of dp rank 2"
    assert cause_of(tmp_path, {2}, dp=4).sentence == words


def test_no_rank_is_accused_that_ran_right_ones_too(tmp_path: Path) -> None:
    cause = cause_of(tmp_path, {1})
    assert cause.name == CauseName.UNEXPLAINED
    assert cause.evidence == ("of 4 microbatches only microbatch 1 is wrong",)


def test_where_all_are_wrong_nothing_is_said(tmp_path: Path) -> None:
    assert cause_of(tmp_path, {0, 1, 2, 3}).evidence == ()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({4, 5, 6, 7}, "dp rank 1"),
        ({1, 5}, "tp rank 1"),
        ({1, 2, 5, 6}, "tp ranks 1 and 2"),
        ({1, 6}, "ranks 1 and 6"),
    ],
)
def test_ranks_are_named_by_the_axis_that_tells_them_apart(ranks: set[int], words: str) -> None:
    assert name_by_axis(ranks, range(8), MESH)[0] == words


def test_ranks_of_one_stage_are_told_from_the_others_of_that_stage() -> None:
    assert name_by_axis({2}, {0, 2}, Mesh.of(dp=2, pp=2)) == ("dp rank 1", "dp")


def test_a_few_ranks_have_numbers_and_many_a_place() -> None:
    mesh = Mesh.of(dp=2, tp=8)
    assert name_ranks({3}, range(16), mesh) == "rank 3"
    assert name_ranks(set(range(8, 16)), range(16), mesh) == "dp rank 1"


def test_a_long_list_says_how_many_more() -> None:
    assert enumerate_few([1]) == "1"
    assert enumerate_few([1, 2, 3]) == "1, 2 and 3"
    assert enumerate_few(list(range(9))) == "0, 1, 2, 3 and 5 more"
