"""The right values in the wrong order are recognised, in tensors of any size; a near miss is not claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.causes import evidence
from ttrace.judge.tensors import values
from ttrace.judge.verdict import Cause, CauseName

FULL = draw_tensor(8, 12)


def changed(case: Case, wrong: torch.Tensor, layout: str = "a b/tp", *, full: torch.Tensor = FULL) -> Cause:
    case.add("0/1/layers.1.fc/output", full, layout, lambda _: wrong)
    return case.judge().findings[0].cause


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (FULL.roll(1, 0), "along dim 0: shifted by 1"),
        (FULL.roll(-2, 1), "along dim 1: shifted by -2"),
        (torch.cat([FULL[4:], FULL[:4]]), "along dim 0: shifted by 4"),
        (FULL[[0, 5, 2, 3, 4, 1, 6, 7]], "along dim 0: indices 1, 5 hold those of 5, 1"),
        (FULL[[0, 1, 2, 3, 0, 1, 2, 3]], "along dim 0: indices 4-7 hold those of 0-3"),
        (FULL[[0, 1, 6, 7, 4, 5, 2, 3]], "along dim 0: indices 2-3, 6-7 hold those of 6-7, 2-3"),
        (FULL[[2, 3, 0, 1, 4, 6, 5, 7]], "along dim 0: indices 0-3, 5-6 hold those of 2-3, 0-1, 6, 5"),
    ],
    ids=["shift", "back", "halves", "swap", "repeat", "quarters", "several"],
)
def test_right_values_in_the_wrong_place_say_where(tmp_path: Path, wrong: torch.Tensor, words: str) -> None:
    found = changed(Case(tmp_path), wrong)
    assert found.name == CauseName.MOVED
    assert found.sentence == f"the right values in the wrong place {words}"
    assert found.evidence[0].startswith("put back, the error is ")


def test_moved_and_changed_is_not_moved(tmp_path: Path) -> None:
    assert changed(Case(tmp_path), nudge(FULL.roll(1, 0), 1e-3)).name == CauseName.UNEXPLAINED


def test_equal_rows_do_not_move(tmp_path: Path) -> None:
    full = FULL.clone()
    full[1:5] = full[0]
    wrong = full.clone()
    wrong[7] += draw_tensor(12, seed=4)
    assert changed(Case(tmp_path), wrong, full=full).name == CauseName.SOME_ROWS


@pytest.mark.parametrize(("shape", "layout"), [((2000,), "a/tp"), ((1000, 2), "a/tp b")])
def test_under_a_loose_tolerance_short_rows_are_always_near_something(
    tmp_path: Path, shape: tuple[int, ...], layout: str
) -> None:
    """Any other numbers of the same distribution would be found among so many."""
    case = Case(tmp_path, noise=0.05)
    found = changed(case, draw_tensor(*shape, seed=6), layout, full=draw_tensor(*shape))
    assert found.name == CauseName.UNEXPLAINED


def test_under_a_loose_tolerance_a_shift_of_short_rows_is_seen(tmp_path: Path) -> None:
    full = draw_tensor(2000)
    found = changed(Case(tmp_path, noise=0.05), full.roll(3), "a/tp", full=full)
    assert found.sentence.endswith("along dim 0: shifted by 3")


@pytest.mark.parametrize(
    "reread",
    [lambda x: x.T.reshape(x.shape), lambda x: x.reshape(x.T.shape).T],
    ids=["written transposed", "read transposed"],
)
def test_a_transposed_read_is_named(tmp_path: Path, reread: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = changed(Case(tmp_path), reread(FULL).contiguous())
    assert found.name == CauseName.TRANSPOSED
    assert found.sentence == (
        "the right values with dims 0 and 1 read in the wrong order: transposed or not contiguous"
    )
    assert found.evidence[0].startswith("read the other way, the error is ")


def test_a_transposed_read_of_heads_is_named(tmp_path: Path) -> None:
    full = draw_tensor(2, 4, 6)
    found = changed(Case(tmp_path), full.transpose(1, 2).reshape(2, 4, 6), "a b c/tp", full=full)
    assert (found.name, "dims 1 and 2" in found.sentence) == (CauseName.TRANSPOSED, True)


def test_a_transposed_read_with_something_on_top_is_not_claimed(tmp_path: Path) -> None:
    assert changed(Case(tmp_path), nudge(FULL.T.reshape(8, 12), 1e-3)).name == CauseName.UNEXPLAINED


def test_a_vocabulary_that_is_shifted_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many rows to hold each against every other, and most of them without a gradient."""
    monkeypatch.setattr(values, "BLOCK", 1 << 18)
    full = draw_tensor(152_000, 16)
    full[torch.rand(len(full)) < 0.9] = 0.0
    found = changed(Case(tmp_path), nudge(full.roll(8, 0), 1e-7), "v/tp h", full=full)
    assert found.sentence == "the right values in the wrong place along dim 0: shifted by 8"


def test_any_permutation_of_many_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MOST_PAIRS", 1000)
    full, order = draw_tensor(600, 96), torch.randperm(600)
    found = changed(Case(tmp_path), full[order], full=full)
    assert found.name == CauseName.MOVED
    assert changed(Case(tmp_path / "other"), draw_tensor(600, 96, seed=5), full=full).name == CauseName.UNEXPLAINED


def test_a_dim_that_is_too_long_to_search_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_ROWS", 11)
    monkeypatch.setattr(values, "MOST_ROWS", 11)
    found = changed(Case(tmp_path), FULL.roll(3, 1))
    assert found.name == CauseName.UNEXPLAINED
    assert found.sentence == "too large to diagnose: patterns are not looked for along a dim of 12 indices"
