"""What a check that passes could have found, and what it did not test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.verdict import Reach, Untested, Weakness
from ttrace.report.facts import list_reach
from ttrace.trace.format import Record
from ttrace.values.generate import Distribution, Integers, Rows

WEIGHT, FULL = "0/-/fc.weight", draw_tensor(8, 12)
IDS, LABELS, MASK = torch.arange(1, 33).reshape(4, 8), torch.arange(2, 34).reshape(4, 8), torch.ones(4, 8)
ONE_STEP = (Untested.LATER_STEPS, Untested.NO_CLIPPING)


def train(case: Case, name: str = "fc.weight", *, step: int = 0, noise: float = 1e-6) -> Case:
    """Add a parameter with a gradient and an update."""
    tensor_id = f"{step}/-/{name}"
    case.add(f"{tensor_id}/param", FULL, "a b/tp", noise=0.0)
    case.add(f"{tensor_id}/param_grad", draw_tensor(8, 12, seed=1), "a b/tp", noise=noise)
    case.add(f"{tensor_id}/param_after", 1.01 * FULL, "a b/tp", noise=0.0)
    return case


def reach_of(case: Case) -> Reach:
    judgement = case.judge()
    assert judgement.reach is not None
    return judgement.reach


def make_case(folder: Path, *names: str, **manifest: Any) -> Case:
    case = Case(folder, parameters=dict.fromkeys(names or ("fc.weight",), True), **manifest)
    case.add_right("0/0/fc/output")
    return case


def test_the_error_is_the_largest_that_any_gradient_would_hide(tmp_path: Path) -> None:
    case = train(train(make_case(tmp_path, "a", "b"), "a"), "b", noise=1e-4)
    found = reach_of(case)
    assert found.weak == {}
    assert found.error is not None
    assert 3e-4 < found.error < 1e-3


def test_a_gradient_with_a_wide_tolerance_is_an_exception(tmp_path: Path) -> None:
    case = make_case(tmp_path, "a", "b", "c")
    for name, noise in (("a", 1e-6), ("b", 1e-6), ("c", 1e-2)):
        train(case, name, noise=noise)
    found = reach_of(case)
    assert found.weak == {"c": Weakness.WIDE_TOLERANCE}
    assert found.error is not None
    assert found.error < 1e-5


def test_where_all_tolerances_are_wide_none_is_an_exception(tmp_path: Path) -> None:
    """As in bfloat16: the error that is reported is larger instead."""
    found = reach_of(train(train(make_case(tmp_path, "a", "b"), "a", noise=1e-2), "b", noise=2e-2))
    assert found.weak == {}
    assert found.error is not None
    assert 4e-2 < found.error < 0.2


def test_an_update_alone_does_not_say_how_large_an_error_of_a_gradient_is_found(tmp_path: Path) -> None:
    case = train(make_case(tmp_path, "a", "b"), "a")
    case.add("0/-/b/param", FULL, "a b/tp", noise=0.0)
    case.add("0/-/b/param_after", 1.01 * FULL, "a b/tp", noise=0.0)
    assert reach_of(case).weak == {"b": Weakness.NO_GRADIENT}


def test_one_step_without_clipping(tmp_path: Path) -> None:
    assert reach_of(train(make_case(tmp_path))).untested == ONE_STEP


def test_two_steps_test_later_steps(tmp_path: Path) -> None:
    case = train(train(make_case(tmp_path)), step=1)
    assert Untested.LATER_STEPS not in reach_of(case).untested


@pytest.mark.parametrize(("factor", "untested"), [(1.0, (Untested.CLIPPING_NOT_REACHED,)), (0.5, ())])
def test_clipping_that_changes_nothing_is_not_tested(
    tmp_path: Path, factor: float, untested: tuple[Untested, ...]
) -> None:
    case = train(make_case(tmp_path))
    case.add("0/-/./clip", torch.tensor(factor), noise=0.0)
    assert reach_of(case).untested == (Untested.LATER_STEPS, *untested)


@pytest.mark.parametrize(
    ("batch", "untested"),
    [
        ({"0": IDS, "1": LABELS}, (Untested.IGNORED_LABELS,)),
        ({"0": IDS, "1": LABELS.where(LABELS > 9, -100)}, ()),
        ({"labels": LABELS}, (Untested.IGNORED_LABELS,)),
        ({"0": draw_tensor(4, 8), "1": LABELS[:, 0]}, ()),  # images with a class for each
        ({"0": IDS, "mask": MASK.bool()}, (Untested.MASKS,)),
        ({"0": IDS, "mask": MASK.long()}, (Untested.MASKS,)),
        ({"0": IDS, "mask": MASK}, (Untested.MASKS,)),
        ({"0": IDS, "mask": ~MASK.bool()}, (Untested.MASKS,)),
        ({"0": IDS, "mask": IDS > 3}, ()),
        ({"0": IDS, "types": torch.zeros(4, 8)}, ()),
    ],
)
def test_labels_and_masks_are_looked_for_in_the_batch(
    tmp_path: Path, batch: dict[str, torch.Tensor], untested: tuple[Untested, ...]
) -> None:
    case = train(make_case(tmp_path))
    for slot, data in batch.items():
        case.add(f"0/0/./batch.{slot}", data, noise=0.0)
    assert reach_of(case).untested == (*ONE_STEP, *untested)


@pytest.mark.parametrize(
    ("values", "untested"),
    [
        (Rows(64), (Untested.IGNORED_LABELS, Untested.OWN_DATA)),
        (Rows(64, keep=0.9, hole=-100), (Untested.OWN_DATA,)),
        (Integers(0, 64), (Untested.IGNORED_LABELS, Untested.OWN_DATA)),
    ],
)
def test_generated_data_replaces_the_script_s(
    tmp_path: Path, values: Distribution, untested: tuple[Untested, ...]
) -> None:
    case = train(make_case(tmp_path))
    case.add("0/0/./batch.labels", LABELS, noise=0.0)
    change_records(case, "0/0/./batch.labels", values=values)
    assert reach_of(case).untested == (*ONE_STEP, *untested)


def change_records(case: Case, name: str, **changes: Any) -> None:
    """Change the reference's records of an id; they keep their bytes."""
    records: list[tuple[Record, torch.Tensor]] = case.reference._records[0]
    for i, (record, tensor) in enumerate(records):
        if str(record.id) == name:
            records[i] = (dataclasses.replace(record, **changes), tensor)


@pytest.mark.parametrize(
    ("end", "untested"),
    [
        (
            {"settings": ({"lr": "0.1", "initial_lr": "0.1"},), "settings_of": {"fc.weight": 0}},
            (Untested.LATER_STEPS, Untested.SCHEDULE, Untested.NO_CLIPPING),
        ),
        (
            {"settings": ({"lr": "0"},), "settings_of": {"fc.weight": 0}},
            (Untested.LATER_STEPS, Untested.LEARNING_RATE_ZERO, Untested.NO_CLIPPING),
        ),
        ({"settings": ({"lr": "0"}, {"lr": "0.1"}), "settings_of": {"fc.weight": 1, "a": 0}}, ONE_STEP),
    ],
)
def test_learning_rates_that_one_step_does_not_test(
    tmp_path: Path, end: dict[str, Any], untested: tuple[Untested, ...]
) -> None:
    case = train(make_case(tmp_path))
    case.candidate.end = end
    assert reach_of(case).untested == untested


def test_dropout_is_not_tested(tmp_path: Path) -> None:
    judgement = train(make_case(tmp_path, dropout=("drop", "drop2"))).judge()
    assert judgement.reach is not None
    assert judgement.reach.untested == (*ONE_STEP, Untested.DROPOUT)
    assert "dropout switched off in 2 modules, the first is drop" in judgement.notes


def test_an_evaluation_has_no_gradients_to_test(tmp_path: Path) -> None:
    assert reach_of(make_case(tmp_path)) == Reach(None, {}, ())


def test_the_box_names_three_parameters_and_counts_the_rest(tmp_path: Path) -> None:
    judgement = train(make_case(tmp_path)).judge()
    weak = dict.fromkeys("abcde", Weakness.NO_GRADIENT) | {"f": Weakness.NO_UPDATE}
    judgement = dataclasses.replace(judgement, reach=Reach(2.1e-6, weak, (Untested.LATER_STEPS, Untested.DROPOUT)))
    assert list(list_reach(judgement)) == [
        (
            "power",
            "an error of 0.0003% of any gradient's norm would have been found, except in a, b, c and 2 more (its "
            "gradient is zero but for rounding, or not judged)",
        ),
        ("", "not tested: f (its update is zero or not judged, so nothing tests the optimizer there)"),
        ("untested", "later steps (one step was traced), dropout (switched off)"),
    ]


@pytest.mark.parametrize(
    ("error", "text"), [(0.0, "0%"), (2e-7, "0.00002%"), (0.0151, "2%"), (0.3, "30%"), (0.31, "40%"), (0.097, "10%")]
)
def test_errors_are_rounded_up(tmp_path: Path, error: float, text: str) -> None:
    judgement = dataclasses.replace(train(make_case(tmp_path)).judge(), reach=Reach(error, {}, ()))
    assert list(list_reach(judgement)) == [
        ("power", f"an error of {text} of any gradient's norm would have been found")
    ]


def test_a_check_that_finds_something_has_no_box(tmp_path: Path) -> None:
    case = train(make_case(tmp_path))
    case.add_wrong("0/0/head/output")
    judgement = case.judge()
    assert judgement.reach is not None
    assert list(list_reach(judgement)) == []
