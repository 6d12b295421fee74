"""Wrong tensors that are recognised by their values; and that nothing is claimed on a near miss."""

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


@pytest.mark.parametrize(
    ("rows", "layout", "words"),
    [
        ([3], "a b/tp", "only 1 of 8 indices of dim 0 is wrong: 3"),
        ([0, 4], "a/tp b", "only 2 of 8 indices of dim 0 are wrong: 0, 4, the first of each shard"),
        ([7], "a/tp b", "only 1 of 8 indices of dim 0 is wrong: 7, the last of a shard"),
        ([1, 2], "a/tp b", "only 2 of 8 indices of dim 0 are wrong: 1-2"),
    ],
)
def test_some_rows_are_named(tmp_path: Path, rows: list[int], layout: str, words: str) -> None:
    wrong = FULL.clone()
    wrong[rows] = draw_tensor(len(rows), 12, seed=5)
    found = changed(Case(tmp_path), wrong, layout)
    assert (found.name, found.sentence) == (CauseName.SOME_ROWS, words)
    assert found.evidence[0].startswith(f"without {'it' if len(rows) == 1 else 'them'} the error is ")


def test_rows_that_are_all_a_rank_holds_are_that_ranks(tmp_path: Path) -> None:
    wrong = torch.cat([FULL[:6], draw_tensor(2, 12, seed=5)])
    assert changed(Case(tmp_path, "tp=4"), wrong, "a/tp b").name == CauseName.SOME_RANKS


def test_rows_beside_others_that_are_off_too_are_not_claimed(tmp_path: Path) -> None:
    wrong = nudge(FULL, 1e-3)
    wrong[3] = draw_tensor(12, seed=5)
    assert changed(Case(tmp_path), wrong).name == CauseName.UNEXPLAINED


def test_a_small_row_is_not_accused_for_the_rounding_of_the_large_ones(tmp_path: Path) -> None:
    full = FULL.clone()
    full[6] *= 1e-3
    wrong = full.clone()
    wrong[3] = draw_tensor(12, seed=5)
    wrong[6] += 1e-6 * draw_tensor(12, seed=8)
    assert changed(Case(tmp_path), wrong, full=full).sentence.endswith("wrong: 3")


@pytest.mark.parametrize("weak", [torch.bfloat16, torch.float16])
def test_values_of_a_weaker_dtype_name_it(tmp_path: Path, weak: torch.dtype) -> None:
    found = changed(Case(tmp_path), FULL.to(weak).float())
    name = str(weak).removeprefix("torch.")
    assert found.name == CauseName.WEAKER_DTYPE
    assert found.sentence == f"the candidate computes in {name} where the reference has float32"
    assert found.evidence[0].startswith(f"every value fits {name}, and the error is ")


def test_a_parameter_held_in_a_weaker_dtype_names_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/-/fc.weight/param", FULL, "a b/tp", lambda x: x.bfloat16())
    assert cause(case).sentence == "the candidate holds bfloat16 where the reference has float32"


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
    found = changed(Case(tmp_path), wrong, full=full)
    assert found.name != CauseName.WEAKER_DTYPE


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


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1.0, ": layers.1.fc.bias, added once too often"),
        (3.0, ": layers.1.fc.bias, added 3 times too often"),
        (-1.0, ": layers.1.fc.bias, left out"),
        (0.5, ""),
    ],
)
def test_one_row_too_much_everywhere_is_a_bias(tmp_path: Path, count: float, words: str) -> None:
    case, row = Case(tmp_path), draw_tensor(12, seed=3)
    case.add("0/-/layers.1.fc.bias/param", row)
    found = changed(case, FULL + count * row)
    assert found.name == CauseName.BIAS
    assert found.sentence == f"the candidate is the reference plus one row, the same everywhere{words}"
    assert found.evidence[0].startswith("without that row the error is ")


def test_rows_that_differ_a_little_are_no_bias(tmp_path: Path) -> None:
    wrong = FULL + draw_tensor(12, seed=3) + 1e-3 * draw_tensor(8, 12, seed=4)
    assert changed(Case(tmp_path), wrong).name == CauseName.UNEXPLAINED


def weighted(*weights: float) -> torch.Tensor:
    return FULL * torch.tensor(weights)[:, None]


MEAN_OF_MEANS = (8 / 6, 8 / 6, 8 / 6, 8 / 10, 8 / 10, 8 / 10, 8 / 10, 8 / 10)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (MEAN_OF_MEANS, "0-2 count 1.333 x, 3-7 count 0.8 x, as in a mean of means over parts of different sizes"),
        ((0.5, *[3.0] * 7), "0 count 0.5 x, 1-7 count 3 x"),
    ],
)
def test_indices_that_do_not_count_alike_are_named(tmp_path: Path, weights: tuple[float, ...], words: str) -> None:
    found = changed(Case(tmp_path), weighted(*weights))
    assert (found.name, found.sentence) == (CauseName.UNEVEN_WEIGHTS, f"indices of dim 0 do not count alike: {words}")


@pytest.mark.parametrize(
    "wrong", [weighted(*range(2, 10)), weighted(*[1.0] * 4, *[0.5] * 4), nudge(weighted(*MEAN_OF_MEANS), 0.05)]
)
def test_a_weight_for_each_index_or_for_some_only_is_not_claimed(tmp_path: Path, wrong: torch.Tensor) -> None:
    assert changed(Case(tmp_path), wrong).name != CauseName.UNEVEN_WEIGHTS


def test_a_wrong_loss_is_told_by_its_gradient(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/0/./loss", draw_tensor(), "", lambda loss: 1.1 * loss)
    case.add("0/0/./grad_output", FULL, change=lambda _: weighted(*MEAN_OF_MEANS))
    [finding] = case.judge().findings
    assert str(finding.comparison.id) == "0/0/./loss"
    assert finding.cause.sentence.startswith("its gradient shows: indices of dim 0 do not count alike")
