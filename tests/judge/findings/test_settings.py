"""Settings are compared as facts: a difference is a finding, whether or not the values of this step show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor, find_comparison
from ttrace.judge.causes.optimizer import compare_values
from ttrace.judge.check import check
from ttrace.judge.findings.isolated import combine
from ttrace.judge.policy import Allowance, Policy
from ttrace.judge.reason import DifferentSetting, Reason, describe
from ttrace.judge.verdict import CauseName, Exit, Judgement, Verdict
from ttrace.report.facts import list_facts, make_headline
from ttrace.trace.format import ModuleInfo

SGD = {"lr": "0.1", "momentum": "0.9", "dampening": "0", "weight_decay": "0.01"}
DROPOUT = {"p": "0.1"}
NORM = {"eps": "1e-05", "momentum": "0.1"}


def update(case: Case, *names: str, factor: float = 1.0, moved: float = 1e-2) -> None:
    """Add parameters with a gradient and an update; the candidate's update is wrong by a factor."""
    for i, name in enumerate(names):
        before, change = draw_tensor(4, 8, seed=i), moved * draw_tensor(4, 8, seed=i + 50)
        case.add(f"0/-/{name}/param", before, "a b", noise=0.0)
        case.add(f"0/-/{name}/param_grad", draw_tensor(4, 8, seed=i + 90), "a b")
        case.add_trusted(f"0/-/{name}/param_after", before + change, noise=1e-8)
        case.candidate.record_parts(f"0/-/{name}/param_after", before + factor * change, "a b")


def set_up(side: TraceBuilder, **by_parameter: dict[str, str]) -> None:
    names = {name.replace("_", "."): settings for name, settings in by_parameter.items()}
    side.end |= {"settings": tuple(names.values()), "settings_of": {name: i for i, name in enumerate(names)}}


def judge_updates(
    folder: Path, ours: dict[str, str], theirs: dict[str, str], factor: float = 1.0, moved: float = 1e-2
) -> Judgement:
    """Judge two parameters, one after the other, that have these settings on each side."""
    case = Case(folder)
    case.add_right("0/0/a/output", "0/0/b/output")
    update(case, "a.weight", "b.weight", factor=factor, moved=moved)
    set_up(case.reference, a_weight=ours, b_weight=ours)
    set_up(case.candidate, a_weight=theirs, b_weight=theirs)
    return case.judge()


@pytest.mark.parametrize(
    ("key", "value"), [("momentum", "0.5"), ("dampening", "0.5"), ("weight_decay", "0"), ("lr", "0.11")]
)
def test_a_setting_that_no_value_shows_is_one_finding(tmp_path: Path, key: str, value: str) -> None:
    judgement = judge_updates(tmp_path, SGD, SGD | {key: value})
    [finding] = judgement.findings
    assert finding.cause.name is CauseName.OPTIMIZER_SETTINGS
    words = f"the optimizer's settings differ for 2 parameters: {key} {value} instead of {SGD[key]}"
    assert finding.cause.sentence == words
    assert (judgement.exit, judgement.count(Verdict.FAIL)) == (Exit.FOUND, 2)
    assert [str(own) for own in finding.covers] == ["0/-/b.weight/update"]
    why = find_comparison(judgement, "0/-/a.weight/update").why
    assert describe(why) == f"its values agree, but its settings differ: {key} {value} instead of {SGD[key]}"


def test_wrong_updates_and_settings_are_one_finding(tmp_path: Path) -> None:
    [finding] = judge_updates(tmp_path, SGD, SGD | {"lr": "0.2"}, factor=2.0).findings
    assert finding.cause.sentence == "the optimizer's settings differ for 2 parameters: lr 0.2 instead of 0.1"
    assert finding.comparison.reason is None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD, SGD),
        (SGD, SGD | {"lr": "0.100001"}),
        (SGD, SGD | {"initial_lr": "0.1"}),
        ({"lr": "0.1", "weight_decay": "0.01"}, {"lr": "0.1"}),
        (SGD | {"momentum": "0", "dampening": "0.5"}, SGD | {"momentum": "0"}),
        ({"lr": "0.1", "eps": "(None, 0.001)"}, {"lr": "0.1", "eps": "(1e-30, 0.001)"}),
        ({"lr": "0.1", "eps": "1e-08"}, {"lr": "0.1", "eps": "(1e-30, 0.001)"}),
        (
            {"lr": "0.1", "weight_decay": "0", "decoupled_weight_decay": "1"},
            {"lr": "0.1", "decoupled_weight_decay": "0"},
        ),
    ],
)
def test_what_decides_nothing_or_cannot_be_compared_is_right(
    tmp_path: Path, ours: dict[str, str], theirs: dict[str, str]
) -> None:
    judgement = judge_updates(tmp_path, ours, theirs)
    assert (judgement.exit, judgement.findings) == (Exit.PASSED, ())


def test_traces_of_different_steps_are_not_compared(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    update(case, "a.weight")
    set_up(case.reference, a_weight=SGD)
    set_up(case.candidate, a_weight=SGD | {"lr": "0.2"})
    case.reference.num_steps = 2
    assert case.judge().exit is Exit.PASSED


def test_the_eps_of_wrong_gradients_may_be_scaled_with_them(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add("0/-/a.weight/param_grad", draw_tensor(4, 8), "a b", lambda x: 2 * x)
    set_up(case.reference, a_weight={"lr": "0.1", "eps": "1e-08"})
    set_up(case.candidate, a_weight={"lr": "0.1", "eps": "2e-08"})
    assert all(f.cause.name is not CauseName.OPTIMIZER_SETTINGS for f in case.judge().findings)


def test_a_policy_allows_settings(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    update(case, "a.weight")
    set_up(case.reference, a_weight=SGD)
    set_up(case.candidate, a_weight=SGD | {"momentum": "0.5"})
    policy = Policy((Allowance.model_validate({"site": "*/update", "reason": "on purpose", "until": "2100-01-01"}),))
    judgement = check(case.reference.close(), [case.twin.close()], case.candidate.close(), policy=policy)
    assert judgement.exit is Exit.PASSED
    assert find_comparison(judgement, "0/-/a.weight/update").reason is Reason.ALLOWED


def test_isolation_does_not_explain_settings(tmp_path: Path) -> None:
    ordinary = judge_updates(tmp_path / "ordinary", SGD, SGD | {"momentum": "0.5"})
    isolated = judge_updates(tmp_path / "isolated", SGD, SGD)
    [finding] = combine(ordinary, isolated).findings
    assert finding.alone is None


# Parameters that no optimizer holds.


@pytest.mark.parametrize(("moved", "is_found"), [(0.0, True), (1e-2, False)])
def test_a_parameter_that_no_optimizer_holds_is_named(tmp_path: Path, moved: float, is_found: bool) -> None:
    """In bfloat16, or at a learning rate of 0, its update is right: it is zero. Another optimizer may update it."""
    case = Case(tmp_path)
    case.add_right("0/0/a/output", "0/0/b/output")
    update(case, "a.weight", "b.weight", moved=moved)
    set_up(case.reference, a_weight=SGD, b_weight=SGD)
    set_up(case.candidate, a_weight=SGD)
    found = [finding.cause.sentence for finding in case.judge().findings]
    assert found == ["the optimizer does not hold b.weight: only the reference's optimizer does"] * is_found


def test_an_optimizer_whose_parameters_are_not_known_is_not_accused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    update(case, "a.weight", moved=0.0)
    set_up(case.reference, a_weight=SGD)
    assert not case.judge().findings


# Modules.


def judge_modules(
    folder: Path,
    ours: ModuleInfo,
    theirs: ModuleInfo,
    evaluated: tuple[str, ...] = (),
    *,
    ran: bool = True,
    trains: bool = True,
) -> Judgement:
    case = Case(folder)
    for name in ("0/0/a.drop/output", "1/0/a.drop/output", "0/0/b.drop/output") if ran else ("0/0/c/output",):
        case.add(name, draw_tensor(4, 8), "a b/tp")
    if trains:
        case.add("0/-/a.weight/param_grad", draw_tensor(4, 8), "a b")
    for side, info in ((case.reference, ours), (case.candidate, theirs)):
        side.modules |= {"a.drop": info, "b.drop": info}
    case.candidate.end["evaluated"] = evaluated
    return case.judge()


def make_module(kind: str, settings: dict[str, str]) -> ModuleInfo:
    return ModuleInfo(type=kind, settings=settings)


def test_the_rate_of_dropout_is_one_finding(tmp_path: Path) -> None:
    drop = "torch.nn.modules.dropout.Dropout"
    [finding] = judge_modules(tmp_path, make_module(drop, DROPOUT), make_module(drop, {"p": "0.3"})).findings
    assert finding.cause.name is CauseName.MODULE_SETTINGS
    assert finding.cause.sentence == "the settings of Dropout differ in 2 modules: p 0.3 instead of 0.1"
    assert str(finding.comparison.id) == "0/0/a.drop/output"


def test_momentum_of_batch_norms_is_compared_across_their_classes(tmp_path: Path) -> None:
    sides = (make_module("torch.nn.modules.batchnorm.BatchNorm2d", NORM),)
    other = make_module("torch.nn.modules.batchnorm.SyncBatchNorm", NORM | {"momentum": "0.9"})
    [finding] = judge_modules(tmp_path, *sides, other).findings
    assert finding.cause.sentence.endswith("momentum 0.9 instead of 0.1")


def test_training_mode_of_dropout_is_compared(tmp_path: Path) -> None:
    drop = make_module("torch.nn.modules.dropout.Dropout", DROPOUT)
    [finding] = judge_modules(tmp_path, drop, drop, ("a.drop",)).findings
    assert finding.cause.sentence == "the settings of Dropout differ in a.drop: training False instead of True"


@pytest.mark.parametrize(
    ("ours", "theirs", "evaluated", "ran"),
    [
        (("torch.nn.Linear", {"eps": "1"}), ("torch.nn.LayerNorm", {"eps": "2"}), (), True),
        (("torch.nn.Dropout", {"p": "0"}), ("torch.nn.Dropout", {"p": "0"}), ("a.drop",), True),
        (("torch.nn.Dropout", {"p": "0.1"}), ("torch.nn.Dropout", {"p": "0.3"}), ("a.drop",), False),
        (("own.Dropout", {"p": "0.1"}), ("own.Dropout", {"p": "0.3"}), (), True),
        (("torch.nn.Dropout", {}), ("torch.nn.Dropout", {"p": "0.3"}), (), True),
    ],
)
def test_modules_that_cannot_be_compared_are_right(
    tmp_path: Path,
    ours: tuple[str, dict[str, str]],
    theirs: tuple[str, dict[str, str]],
    evaluated: tuple[str, ...],
    ran: bool,
) -> None:
    judgement = judge_modules(tmp_path, make_module(*ours), make_module(*theirs), evaluated, ran=ran)
    assert (judgement.exit, judgement.findings) == (Exit.PASSED, ())


def test_a_rollout_has_no_dropout(tmp_path: Path) -> None:
    ours, theirs = (make_module("torch.nn.Dropout", {"p": p}) for p in ("0.1", "0.3"))
    assert judge_modules(tmp_path, ours, theirs, ("a.drop", "b.drop"), trains=False).exit is Exit.PASSED


# Notes.


def test_what_decides_only_other_steps_is_noted(tmp_path: Path) -> None:
    ours = {"lr": "0", "initial_lr": "0.1", "next_lr": "0.01"}
    theirs = {"lr": "0", "initial_lr": "0.11", "next_lr": "0.011"}
    judgement = judge_updates(tmp_path, ours, theirs, moved=0.0)
    assert not judgement.findings
    words = (
        "initial_lr 0.11 instead of 0.1 for a.weight and 1 more, next_lr 0.011 instead of 0.01 for a.weight and 1 more"
    )
    assert f"learning rates of other steps differ: {words}" in judgement.notes


def test_numbers_dtypes_and_frozen_parameters_are_noted(tmp_path: Path) -> None:
    case = Case(tmp_path, parameters={"a.weight": False})
    case.add_right("0/0/a/output")
    case.reference._manifest["parameters"] = {"a.weight": True}
    case.add_trusted("0/-/a.weight/param", draw_tensor(4, 8).bfloat16().float(), noise=0.0)
    case.candidate.record_parts("0/-/a.weight/param", draw_tensor(4, 8).to(torch.bfloat16), "a b")
    for side, scale in ((case.reference, "0.125"), (case.candidate, "0.25")):
        side.modules["a"] = make_module("own.Attention", {"scale": scale})
    judgement = case.judge()
    assert not judgement.findings
    for words in (
        "frozen parameters differ: requires_grad False instead of True for a.weight",
        "dtypes of parameters differ: dtype bfloat16 instead of float32 for a.weight",
        "numbers of the model's own modules differ: scale 0.25 instead of 0.125 for a",
    ):
        assert words in judgement.notes


def test_values_of_several_ranks_must_all_agree() -> None:
    assert compare_values("lr", {"0.1"}, {"0.1", "0.2"}) == DifferentSetting("lr", "0.1 and 0.2", "0.1")
    assert compare_values("lr", {"0.1", "0.2"}, {"0.2", "0.1"}) is None
    assert compare_values("momentum", {"None"}, {"0.1"}) == DifferentSetting("momentum", "0.1", "None")


def test_settings_of_a_parameter_whose_update_is_not_recorded_are_reported(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add("0/-/a.weight/param_grad", draw_tensor(4, 8), "a b")
    set_up(case.reference, a_weight=SGD)
    set_up(case.candidate, a_weight=SGD | {"momentum": "0.5"})
    judgement = case.judge()
    [finding] = judgement.findings
    assert judgement.exit is Exit.FOUND
    site, rest = make_headline(finding, first=True)
    assert (site, rest) == ("a.weight/update", "is set differently  (step 0)")
    assert dict(list_facts(finding, [])) == {
        "cause": "the optimizer's settings differ for a.weight: momentum 0.5 instead of 0.9",
        "evidence": "the values of this step do not show it",
        "module": "a, model.py:1",
    }
