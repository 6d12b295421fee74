"""Wrong rows of a tensor are recognised, and a near miss is not claimed."""

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


MASKED = (3, 5, 9, 12)


def cause_of(folder: Path, full: torch.Tensor, weights: torch.Tensor, layout: str) -> Cause:
    case = Case(folder, "cp=2")
    case.add("0/0/fc/output", full, layout, lambda x: x * weights[:, None])
    return case.judge().findings[0].cause


def test_ranks_are_named_and_masked_rows_are_not(tmp_path: Path) -> None:
    full, weights = draw_tensor(16, 12), torch.tensor([1.25] * 8 + [0.8] * 8)
    full[list(MASKED)] = 0.0
    cause = cause_of(tmp_path, full, weights, "t/cp d")
    assert cause.name == CauseName.UNEVEN_WEIGHTS
    assert cause.sentence == (
        "indices of dim 0 do not count alike: those of cp rank 0 count 1.25 x, those of cp rank 1 count 0.8 x"
    )


def test_a_mean_of_means_counts_tokens_that_are_not_masked(tmp_path: Path) -> None:
    full = draw_tensor(16, 12)
    full[[8, 9, 10, 11]] = 0.0  # 8 tokens are left on the first rank, 4 on the second
    cause = cause_of(tmp_path, full, torch.tensor([12 / 16] * 8 + [12 / 8] * 8), "t/cp d")
    assert cause.sentence.endswith(
        "those of cp rank 1 count 1.5 x, as in a mean of means over parts of different sizes"
    )


def test_without_ranks_of_their_own_indices_are_named(tmp_path: Path) -> None:
    full, weights = draw_tensor(16, 12), torch.tensor([1.25] * 4 + [0.8] * 12)
    assert "0-3 count 1.25 x, 4-15 count 0.8 x" in cause_of(tmp_path, full, weights, "t d/cp").sentence


def sentence_of(folder: Path, rows: list[int], layout: str) -> str:
    case, full = Case(folder, "cp=2"), draw_tensor(64, 12)
    wrong = full.clone()
    wrong[rows] = draw_tensor(len(rows), 12, seed=5)
    case.add("0/0/fc/output", full, layout, lambda _: wrong)
    return case.judge().findings[0].cause.sentence


def test_few_are_listed(tmp_path: Path) -> None:
    assert sentence_of(tmp_path, [1, 2, 9], "t d/cp") == "only 3 of 64 indices of dim 0 are wrong: 1-2, 9"


def test_many_are_told_by_the_ranks_that_hold_them(tmp_path: Path) -> None:
    rows = list(range(33, 60, 2))
    words = "only 14 of 64 indices of dim 0 are wrong: 14 between 33 and 59, of cp rank 1"
    assert sentence_of(tmp_path / "cut", rows, "t/cp d") == words
    assert sentence_of(tmp_path / "whole", rows, "t d/cp") == words.removesuffix(", of cp rank 1")
