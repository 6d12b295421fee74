"""Modules and parameters that only one side has are told once."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.traces import Case, draw_tensor, find_comparison
from ttrace.judge.reason import describe
from ttrace.judge.verdict import CauseName, Exit, Verdict

LAYER = ("layers.3/input", "layers.3.fc/input", "layers.3.fc/output", "layers.3/output")


def case_with(tmp_path: Path, lacking: str = "") -> Case:
    """A model of which one side has no layers.3."""
    case = Case(tmp_path)
    case.add_right("0/0/layers.2.fc/output")
    for name in LAYER:
        for side in (case.reference, case.twin, case.candidate):
            if side is not getattr(case, lacking, None):
                side.record_parts(f"0/0/{name}", draw_tensor(4, 8))
    return case


def test_a_missing_layer_is_one_problem(tmp_path: Path) -> None:
    judgement = case_with(tmp_path, "candidate").judge()
    assert judgement.problems == ("the candidate has no layers.3: 4 tensors missing",)
    assert describe(find_comparison(judgement, "0/0/layers.3.fc/output").why) == "the candidate has no layers.3"
    assert judgement.exit is Exit.UNJUDGED


def test_a_layer_too_many_is_one_problem(tmp_path: Path) -> None:
    judgement = case_with(tmp_path, "reference").judge()
    assert judgement.problems == ("the reference has no layers.3: 4 tensors missing",)


def test_equal_models_have_no_such_problem(tmp_path: Path) -> None:
    assert case_with(tmp_path).judge().problems == ()


def test_a_missing_parameter_of_a_module_that_is_there_is_named(tmp_path: Path) -> None:
    case = case_with(tmp_path)
    for kind in ("param", "param_grad"):
        case.add_trusted(f"0/-/layers.3.fc.bias/{kind}", draw_tensor(4, 8))
    assert case.judge().problems == ("the candidate has no layers.3.fc.bias: 2 tensors missing",)


def test_a_single_missing_tensor_speaks_for_itself(tmp_path: Path) -> None:
    case = case_with(tmp_path)
    case.add_trusted("0/0/head/output", draw_tensor(4, 8))
    judgement = case.judge()
    assert judgement.problems == ()
    assert describe(find_comparison(judgement, "0/0/head/output").why) == "the candidate has no such tensor"


def test_missing_tensors_of_a_module_that_both_have_are_no_absence(tmp_path: Path) -> None:
    case = case_with(tmp_path)
    for kind in ("grad_input", "grad_output"):
        case.add_trusted(f"0/0/layers.3.fc/{kind}", draw_tensor(4, 8))
    assert case.judge().problems == ()


def test_a_model_that_is_wrong_without_the_layer_is_wrong_because_of_it(tmp_path: Path) -> None:
    case = case_with(tmp_path, "candidate")
    case.add_right("0/0/./input")
    case.add_wrong("0/0/norm/input", "0/0/./output")
    first = case.judge().findings[0]
    assert (first.module, first.cause.name) == (".", CauseName.MISSING_MODULES)
    assert first.cause.sentence == "the candidate has no layers.3: 4 tensors missing"


def test_a_known_cause_is_not_put_down_to_the_missing_layer(tmp_path: Path) -> None:
    case = case_with(tmp_path, "candidate")
    case.add("0/0/./output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    assert case.judge().findings[0].cause.name == CauseName.DOUBLE_REDUCTION


def test_many_missing_layers_are_counted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    for i in range(6):
        case.add_trusted(f"0/0/layers.{i}/output", draw_tensor(4, 8))
    assert case.judge().problems == (
        "the candidate has no layers.0, layers.1, layers.2, layers.3 and 2 more: 6 tensors missing",
    )


def test_a_tied_weight_is_not_missing_under_its_other_name(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.candidate._manifest["aliases"] = {"head.weight": "words.weight"}
    for kind in ("param", "param_grad"):
        case.add_trusted(f"0/-/head.weight/{kind}", torch.ones(2))
    judgement = case.judge()
    assert judgement.count(Verdict.MISSING) == 2
    assert judgement.problems == ()
