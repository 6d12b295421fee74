"""Rows that do not count alike are named by the ranks that hold them; rows that are zero do not count."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Cause, CauseName

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
