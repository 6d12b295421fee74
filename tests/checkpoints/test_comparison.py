"""What differs between two checkpoints is found, with its region and its cause; rounding to another dtype is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.commands import ttrace
from ttrace.checkpoints.checkpoint import open_checkpoint
from ttrace.checkpoints.comparison import CheckpointComparison, Sameness, compare_checkpoints, find_prefixes
from ttrace.judge.verdict import CauseName

DRAW = torch.Generator().manual_seed(0)
WEIGHTS = {f"layers.{i}.{name}.weight": torch.randn(8, 6, generator=DRAW) for i in range(3) for name in ("q", "k")}
NAME = "layers.1.q.weight"
Tensors = dict[str, torch.Tensor]


def compare(folder: Path, ours: object, theirs: object) -> CheckpointComparison:
    for name, tensors in (("a.pt", ours), ("b.pt", theirs)):
        torch.save(tensors, folder / name)
    return compare_checkpoints(open_checkpoint(folder / "a.pt"), open_checkpoint(folder / "b.pt"))


def change(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {**WEIGHTS, NAME: wrong(WEIGHTS[NAME].clone())}


def zero_rows(weight: torch.Tensor) -> torch.Tensor:
    weight[4:] = 0.0
    return weight


@pytest.mark.parametrize(
    ("wrong", "cause", "words"),
    [
        (lambda _: WEIGHTS["layers.2.q.weight"], CauseName.OTHERS_VALUES, "layers.2.q.weight"),
        (lambda weight: weight.roll(1, 0), CauseName.MOVED, "shifted by 1"),
        (lambda weight: weight.T.reshape(8, 6), CauseName.TRANSPOSED, "dims 0 and 1"),
        (lambda weight: 2 * weight, CauseName.CONSTANT_FACTOR, "2 x the reference"),
        (lambda weight: weight.bfloat16().float(), CauseName.WEAKER_DTYPE, "bfloat16"),
        (zero_rows, CauseName.ZEROS, "only [4:8, 0:6] of [8, 6] differs"),
        (lambda weight: weight * (1 + 1e-7), CauseName.UNEXPLAINED, "differ by rounding"),
        (lambda weight: weight + torch.linspace(0, 1, 6).square(), CauseName.UNEXPLAINED, "no known pattern"),
    ],
)
def test_a_difference_has_its_cause(
    tmp_path: Path, wrong: Callable[[torch.Tensor], torch.Tensor], cause: CauseName, words: str
) -> None:
    found = compare(tmp_path, WEIGHTS, change(wrong))
    (difference,) = found.differences
    assert (difference.name, difference.sameness, difference.cause) == (NAME, Sameness.DIFFERENT, cause)
    assert words in difference.sentence
    assert found.counts[Sameness.SAME] == len(WEIGHTS) - 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda weight: torch.cat([weight, torch.zeros(2, 6)]),
            "the candidate has 2 more indices of zeros along dim 0",
        ),
        (lambda weight: torch.cat([weight, weight[:2]], 0), "2 more indices of other values along dim 0"),
        (lambda weight: weight.T.contiguous(), "transposed"),
        (lambda weight: weight.reshape(2, 4, 6), "the same values in another shape"),
        (lambda weight: weight[4:].clone(), "one has only 4:8 of the other along dim 0"),
        (lambda _: torch.randn(3, 5), "[8, 6] in the reference, [3, 5] in the candidate"),
    ],
)
def test_another_shape_is_explained(tmp_path: Path, wrong: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    (difference,) = compare(tmp_path, WEIGHTS, change(wrong)).differences
    assert difference.sameness is Sameness.OTHER_SHAPE
    assert words in difference.sentence


def test_the_same_values_are_the_same_whatever_they_are(tmp_path: Path) -> None:
    odd = {"nan": torch.tensor([torch.nan, torch.inf, -0.0]), "empty": torch.empty(0, 3), "count": torch.tensor(7)}
    assert compare(tmp_path, odd, odd).is_same


def test_a_weaker_dtype_that_is_rightly_rounded_is_no_difference(tmp_path: Path) -> None:
    found = compare(tmp_path, WEIGHTS, {name: weight.bfloat16() for name, weight in WEIGHTS.items()})
    assert found.is_same
    assert found.counts[Sameness.ROUNDED] == len(WEIGHTS)
    truncated = {
        name: (weight.view(torch.int32) & -65536).view(torch.float32).bfloat16() for name, weight in WEIGHTS.items()
    }
    assert not compare(tmp_path, WEIGHTS, truncated).is_same


def test_missing_tensors_and_other_values_are_differences(tmp_path: Path) -> None:
    ours = {**WEIGHTS, "step": 3, "lr": 0.1}
    theirs = {name: weight for name, weight in WEIGHTS.items() if name != NAME} | {"more": torch.ones(1), "step": 4}
    found = compare(tmp_path, ours, theirs)
    assert [(each.name, each.sameness) for each in found.differences] == [
        (NAME, Sameness.ONLY_REFERENCE),
        ("more", Sameness.ONLY_CANDIDATE),
        ("step", Sameness.DIFFERENT),
    ]
    assert "1 values are only in one of them, such as lr" in found.notes


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            torch.tensor([0.0, 1.0]),
            torch.tensor([-0.0, 1.0]),
            "only [0:1] of [2] differs, and there the values are equal",
        ),
        (torch.tensor(3), torch.tensor(4), "the candidate comes to 4"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 2.0]), "only [1:2] of [2] differs"),
        (torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64), "no causes are known"),
    ],
)
def test_odd_values_that_differ_are_found(tmp_path: Path, ours: torch.Tensor, theirs: torch.Tensor, words: str) -> None:
    (difference,) = compare(tmp_path, {"x": ours}, {"x": theirs}).differences
    assert words in difference.sentence


def test_the_same_integers_in_another_dtype_are_no_difference(tmp_path: Path) -> None:
    assert compare(tmp_path, {"x": torch.tensor(3)}, {"x": torch.tensor(3, dtype=torch.int32)}).is_same


def test_a_prefix_of_all_names_does_not_matter(tmp_path: Path) -> None:
    found = compare(tmp_path, {"model": WEIGHTS, "extra": torch.ones(1)}, WEIGHTS)
    assert [each.name for each in found.differences] == ["extra"]
    assert "names of the reference were read without 'model.'" in found.notes
    assert find_prefixes(["a.w", "b.w"], ["module.a.w", "module.b.w"]) == ("", "module.")
    assert find_prefixes(["a.w"], ["a.w", "module.a.w"]) == ("", "")


@pytest.mark.usefixtures("warm_commands")
def test_the_command_prints_and_exits_by_what_it_finds(tmp_path: Path) -> None:
    compare(tmp_path, WEIGHTS, change(zero_rows))
    files = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    ran = ttrace("compare", *files)
    assert ran.returncode == 1
    assert ran.stdout.startswith(f"✗ 1 differ\n  {NAME}  zeros: only [4:8, 0:6] of [8, 6] differs")
    found = json.loads(ttrace("compare", *files, "--json").stdout)
    assert (found["same"], found["differences"][0]["region"]) == (False, [[4, 8], [0, 6]])
    assert ttrace("compare", files[0], files[0]).returncode == 0
    assert ttrace("compare", files[0], str(tmp_path / "nothing")).returncode == 2
