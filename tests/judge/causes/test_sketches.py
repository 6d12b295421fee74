"""Causes that only add and subtract tensors are found in sketches too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Cause, CauseName

FULL, OTHER = draw_tensor(64, 96), draw_tensor(64, 96, seed=1)
ID = "0/1/layers.1.fc/output"


def sketched(folder: Path, mesh: str = "tp=2") -> Case:
    return Case(folder, mesh, num_buckets=256)


def find_cause(case: Case) -> Cause:
    return case.judge().findings[0].cause


@pytest.mark.parametrize(("count", "words"), [(2, "added 2 times too often"), (-1, "left out")])
def test_a_part_that_does_not_count_once(tmp_path: Path, count: int, words: str) -> None:
    case = sketched(tmp_path)
    case.add("0/1/layers.1.fc.lora/output", OTHER, "a b/tp")
    case.add(ID, FULL, "a b/tp", lambda x: x + count * OTHER)
    found = find_cause(case)
    assert (found.name, found.sentence) == (
        CauseName.MISCOUNTED_PART,
        f"the output of layers.1.fc.lora is {words}",
    )


def test_a_bias_that_is_added_too_often(tmp_path: Path) -> None:
    case, bias = sketched(tmp_path), draw_tensor(96, seed=2)
    case.add("0/-/layers.1.fc.bias/param", bias)
    case.add(ID, FULL, "a b/tp", lambda x: x + bias)
    found = find_cause(case)
    assert found.name is CauseName.BIAS
    assert found.sentence.endswith("layers.1.fc.bias, added once too often")


@pytest.mark.parametrize("other", ["0/0/layers.1.fc/output", "0/1/layers.0.fc/output"])
def test_values_of_another_microbatch_or_layer(tmp_path: Path, other: str) -> None:
    case = sketched(tmp_path)
    case.add(other, OTHER, "a b/tp")
    case.add(ID, FULL, "a b/tp", lambda _: OTHER)
    assert find_cause(case).name is CauseName.OTHERS_VALUES


def test_replicas_that_were_not_summed(tmp_path: Path) -> None:
    case = sketched(tmp_path)
    case.add_trusted(ID, FULL)
    for rank, part in enumerate((0.25 * FULL + OTHER, 0.75 * FULL - OTHER)):
        case.candidate.record(rank, ID, part, "a b")
    found = find_cause(case)
    assert (found.name, found.axis) == (CauseName.MISSING_ALL_REDUCE, "tp")


def test_what_is_near_is_not_claimed(tmp_path: Path) -> None:
    case = sketched(tmp_path)
    case.add("0/1/layers.1.fc.lora/output", OTHER, "a b/tp")
    case.add("0/1/layers.0.fc/output", OTHER, "a b/tp")
    case.add(ID, FULL, "a b/tp", lambda x: x + OTHER + 0.3 * torch.roll(OTHER, 1, 0))
    assert find_cause(case).name is CauseName.UNEXPLAINED
