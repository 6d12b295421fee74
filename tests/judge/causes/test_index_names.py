"""Indices are named one by one only where they are few."""

from __future__ import annotations

from pathlib import Path

from tests.support.traces import Case, draw_tensor


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
