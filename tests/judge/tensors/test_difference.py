"""One id, looked at closely."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.errors import TTraceError
from ttrace.judge.tensors.difference import (
    NUM_ELEMENTS,
    Difference,
    enumerate_few,
    find_difference,
    name_by_axis,
    name_ranks,
)
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh

ID = "0/0/fc/output"
FULL = draw_tensor(8, 12)


def looked_at(case: Case, name: str = ID) -> Difference:
    return find_difference(case.reference.close(), case.candidate.close(), TensorId.parse(name))


def with_errors(*at: tuple[int, ...]) -> torch.Tensor:
    wrong = FULL.clone()
    for size, index in enumerate(reversed(at), start=1):
        wrong[index] += 10 * size
    return wrong


def test_every_rank_is_measured_against_its_own_region(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a/tp b", lambda x: torch.cat([x[:4], 3 * x[4:]]))
    found = looked_at(case)
    assert [rank.where for rank in found.ranks] == ["rank 0 (tp0)", "rank 1 (tp1)"]
    assert [rank.region for rank in found.ranks] == ["[0:4, 0:12]", "[4:8, 0:12]"]
    assert [rank.stats.error for rank in found.ranks] == pytest.approx([0.0, 2.0])
    assert (found.shape, found.layout) == ((8, 12), "a/tp b")


def test_replicas_are_measured_one_by_one(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add_trusted(ID, FULL)
    for rank in range(4):
        part = FULL[:4] if rank % 2 == 0 else FULL[4:]
        case.candidate.record(rank, ID, 3 * part if rank == 3 else part, "a/tp b", shape=(8, 12))
    found = looked_at(case)
    assert [replica.where for replica in found.replicas] == ["rank 0, 1", "rank 2, 3"]
    assert found.total.error == 0.0
    assert found.worst is found.replicas[1]
    assert found.worst.stats.error > 1


@pytest.mark.parametrize("layout", ["a b", "a/tp b", "a b +tp"])
def test_replicas_that_are_alike_have_no_worst_one(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path, "dp=2 tp=2")
    case.add(ID, FULL, layout, lambda x: 3 * x)
    found = looked_at(case)
    assert found.worst is None
    assert len(found.replicas) == (4 if layout == "a b" else 2)


@pytest.mark.parametrize("layout", ["a/tp b", "a/tp:zigzag b", "a b/tp:fused(3)", "a b/tp:striped"])
def test_the_worst_elements_have_global_indices(tmp_path: Path, layout: str) -> None:
    case = Case(tmp_path)
    at = [(7, 11), (0, 5), (3, 0)]
    case.add(ID, FULL, layout, lambda _: with_errors(*at))
    found = looked_at(case)
    assert len(found.elements) == NUM_ELEMENTS
    assert [element.index for element in found.elements[:3]] == at
    for element in found.elements[:3]:
        holder = next(r for r in range(2) if str(case.candidate.mesh.coord(r)) == element.where)
        region = Layout.parse(layout).region((8, 12), {"tp": 2}, {"tp": holder})
        numbers = torch.arange(96).reshape(8, 12)
        assert int(numbers[element.index]) in region.take(numbers).flatten().tolist()
        assert element.reference == pytest.approx(float(FULL[element.index]))
    assert found.elements[0].candidate - found.elements[0].reference == pytest.approx(30, rel=1e-5)


def test_elements_of_a_pending_sum_are_those_of_the_sum(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(ID, FULL, "a b +tp", lambda _: with_errors((2, 2)))
    found = looked_at(case)
    assert found.pending == ("tp",)
    assert (found.elements[0].index, found.elements[0].where) == ((2, 2), "summed over tp")
    assert found.elements[0].candidate == pytest.approx(float(FULL[2, 2]) + 10, rel=1e-5)
    assert len(found.ranks) == 2


def test_gradients_are_seen_after_the_factor_still_to_come(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2", grad_factor=0.5)
    name = "0/0/fc/grad_output"
    case.add(name, FULL, "a/dp b", lambda x: 2 * x)
    found = looked_at(case, name)
    assert found.factor == 0.5
    assert found.total.error == 0.0
    assert all(rank.stats.error == 0.0 for rank in found.ranks)
    assert all(element.reference == element.candidate for element in found.elements)


def test_an_element_that_is_not_a_number_is_the_worst(tmp_path: Path) -> None:
    case = Case(tmp_path)
    wrong = with_errors((0, 0))
    wrong[5, 5] = torch.nan
    case.add(ID, FULL, "a/tp b", lambda _: wrong)
    found = looked_at(case)
    assert found.elements[0].index == (5, 5)
    assert math.isnan(found.elements[0].candidate)


@pytest.mark.parametrize("value", [torch.tensor(1.5), torch.tensor(3), torch.tensor(True)], ids=str)
def test_a_single_number_can_be_looked_at(tmp_path: Path, value: torch.Tensor) -> None:
    case = Case(tmp_path)
    case.add("0/0/./loss", value)
    (first, _) = looked_at(case, "0/0/./loss").elements
    assert (first.index, first.reference, first.candidate) == ((), float(value), float(value))


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_an_unknown_id_says_on_which_side_and_where_to_look(tmp_path: Path, side: str) -> None:
    case = Case(tmp_path)
    (case.candidate if side == "reference" else case.reference).record_parts(ID, FULL)
    with pytest.raises(
        TTraceError, match=rf"the {side} has not recorded this tensor\. `ttrace show .*{side}` lists all"
    ):
        looked_at(case)


def test_what_cannot_be_laid_over_each_other_asks_for_a_rule(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_trusted(ID, FULL)
    for rank in range(2):
        case.candidate.record(rank, ID, FULL[:3])
    with pytest.raises(TTraceError, match="Add a rule"):
        looked_at(case)


# Ranks and microbatches are named by what they share.


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
