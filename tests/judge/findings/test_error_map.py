"""Where in a tensor its error lies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.findings import error_map as module
from ttrace.judge.findings.error_map import ErrorMap, map_error

NAME = "0/0/fc/output"


def mapped(case: Case, name: str = NAME) -> ErrorMap:
    judgement = case.judge()
    found = map_error(find_comparison(judgement, name), case.reference.close(), case.candidate.close())
    assert found is not None
    return found


def row_broken(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(0, torch.tensor([3]), 9.0)


def test_each_rank_is_mapped_at_its_place_in_the_logical_tensor(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(NAME, draw_tensor(4, 8), "a b/tp", row_broken)
    left, right = mapped(case).ranks
    assert (left.where, right.where) == ("rank 0 (tp0)", "rank 1 (tp1)")
    assert [[math.isnan(value) for value in row] for row in left.blocks] == [[False] * 4 + [True] * 4] * 4
    assert [[math.isnan(value) for value in row] for row in right.blocks] == [[True] * 4 + [False] * 4] * 4
    assert all(value == 0 for row in left.blocks[:3] for value in row[:4])
    assert all(value > 1 for value in left.blocks[3][:4])


def test_many_elements_share_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 2)
    case = Case(tmp_path)
    case.add(NAME, torch.ones(4, 2, 6), "...", lambda x: x + torch.tensor([0.0, 0, 0, 1, 2, 2]))
    (first, second) = mapped(case).ranks
    assert first.blocks == second.blocks
    assert [value for row in first.blocks for value in row] == pytest.approx([0, math.sqrt(3)] * 2)


def test_summands_are_mapped_by_their_sum(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(NAME, torch.ones(2, 2), "... +tp", lambda x: x * 2)
    (one,) = mapped(case).ranks
    assert one.where == "summed over tp"
    assert [value for row in one.blocks for value in row] == pytest.approx([1.0] * 4)


def test_of_a_large_shard_a_sample_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ELEMENTS", 100)
    case = Case(tmp_path)
    case.add(NAME, draw_tensor(64, 64), "a b/tp", lambda x: 3 * x)
    found = mapped(case)
    sampled = [value for row in found.ranks[0].blocks for value in row[:16] if not math.isnan(value)]
    assert 50 < len(sampled) <= 100


def test_what_is_not_finite_is_infinitely_wrong(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add(NAME, torch.ones(2, 2), "...", lambda x: x * torch.nan)
    assert mapped(case).ranks[0].blocks == ((math.inf,) * 2,) * 2


def test_scalars_and_tensors_without_a_layout(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add("0/0/./loss", torch.tensor(2.0), "...", lambda x: x * 2)
    case.add_trusted(NAME, draw_tensor(4, 8))
    judgement = case.judge()
    traces = case.reference.close(), case.candidate.close()
    assert map_error(find_comparison(judgement, NAME), *traces) is None
    loss = map_error(find_comparison(judgement, "0/0/./loss"), *traces)
    assert loss is not None
    assert loss.ranks[0].blocks == ((1.0,),)
