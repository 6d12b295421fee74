"""Wrong tensors that hold the values of another tensor are recognised, and a near miss is not claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.verdict import Cause, CauseName

ID = "0/1/layers.1.fc/output"
FULL = draw_tensor(8, 12)


def cause(case: Case) -> Cause:
    return case.judge().findings[0].cause


def changed(case: Case, wrong: torch.Tensor, layout: str = "a b/tp", *, full: torch.Tensor = FULL) -> Cause:
    case.add(ID, full, layout, lambda _: wrong)
    return cause(case)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("0/0/layers.1.fc/output", "microbatch 0"),
        ("1/1/layers.1.fc/output", "step 1"),
        ("0/1/layers.1.fc@1/output", "call 1"),
        ("0/1/layers.0.fc/output", "layers.0.fc"),
    ],
)
def test_the_values_of_a_relative_are_named(tmp_path: Path, other: str, words: str) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add(other, values, "a b/tp")
    found = changed(case, nudge(values, 1e-7))
    assert (found.name, found.sentence) == (
        CauseName.OTHERS_VALUES,
        f"the candidate holds the reference's values of {words}",
    )
    assert found.evidence[0].startswith(f"against {other} the error is ")


def test_a_message_that_was_meant_for_another_layer_is_named(tmp_path: Path) -> None:
    case, sent = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add("0/2/layers.0/output", sent)
    case.add("0/0/layers.1/grad_output", FULL, change=lambda _: sent)
    [finding] = case.judge().findings
    assert finding.cause.name == CauseName.OTHERS_VALUES
    assert finding.cause.sentence.startswith("what arrived is 0/2/layers.0/output of the reference")


def test_a_parameter_that_was_loaded_into_its_neighbour_is_named(tmp_path: Path) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add("0/-/layers.1.norm1.weight/param", values)
    case.add("0/-/layers.1.second.weight/param", FULL, change=lambda _: values)
    assert cause(case).sentence == "the candidate holds the reference's values of layers.1.norm1.weight"


def test_the_values_of_a_relative_on_one_rank_are_named(tmp_path: Path) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add("0/0/layers.1.fc/output", values, "a b/tp")
    assert changed(case, torch.cat([FULL[:, :6], values[:, 6:]], 1)).name == CauseName.OTHERS_VALUES


@pytest.mark.parametrize(
    "other", ["1/0/layers.1.fc/output", "0/1/layers.0.fc/input", "0/0/layers.0.fc/output", "0/1/other.fc/output"]
)
def test_the_values_of_a_stranger_are_not_claimed(tmp_path: Path, other: str) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add(other, values, "a b/tp")
    assert changed(case, values).name == CauseName.UNEXPLAINED


def test_values_near_a_relatives_are_not_claimed(tmp_path: Path) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add("0/0/layers.1.fc/output", values, "a b/tp")
    assert changed(case, nudge(values, 1e-3)).name == CauseName.UNEXPLAINED


def test_zeros_on_a_rank_are_no_relatives_values(tmp_path: Path) -> None:
    """Where another microbatch's gradient is zero too, as in unused rows of an embedding."""
    case, half = Case(tmp_path), torch.cat([FULL[:4], torch.zeros(4, 12)])
    case.add("0/0/layers.1.fc/output", half, "a/tp b")
    found = changed(case, torch.cat([FULL[:4], torch.zeros(4, 12)]), "a/tp b")
    assert (found.name, found.sentence) == (CauseName.SOME_RANKS, "only the shards of rank 1 are wrong")


def summands(case: Case, *, name: str = "0/1/layers.1.fc.inner/output") -> list[torch.Tensor]:
    """An inner site with a pending sum over tp."""
    parts = [draw_tensor(8, 12, seed=3), FULL - draw_tensor(8, 12, seed=3)]
    case.add_trusted(name, FULL)
    for rank, part in enumerate(parts):
        case.candidate.record(rank, name, part, "a b +tp")
    return parts


def test_a_partial_sum_that_all_ranks_hold_is_named(tmp_path: Path) -> None:
    case = Case(tmp_path)
    found = changed(case, summands(case)[0], "a b")
    assert (found.name, found.axis) == (CauseName.PARTIAL_SUM, "tp")
    assert found.sentence == (
        "a partial sum was passed on: each part is one rank's summand of layers.1.fc.inner/output, never summed over tp"
    )
    assert found.evidence == ("against that summand the error is 0.0e+00",)


def test_partial_sums_cut_instead_of_reduced_and_scattered_are_named(tmp_path: Path) -> None:
    case = Case(tmp_path)
    parts = summands(case)
    found = changed(case, torch.cat([parts[0][:4], parts[1][4:]]), "a/tp b")
    assert (found.name, found.axis) == (CauseName.PARTIAL_SUM, "tp")


def test_what_is_near_a_summand_is_no_partial_sum(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert changed(case, nudge(summands(case)[0], 1e-3), "a b").name == CauseName.UNEXPLAINED


def test_a_summand_of_another_module_is_no_partial_sum(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert changed(case, summands(case, name="0/1/other/output")[0], "a b").name == CauseName.UNEXPLAINED
