"""Where something starts to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor
from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import CauseName, Judgement


def judge(folder: Path, *tensors: str) -> Judgement:
    """A run with these tensors, in this order; those with a '!' in front are wrong."""
    case = Case(folder)
    for tensor in tensors:
        (case.add_wrong if tensor.startswith("!") else case.add_right)(tensor.removeprefix("!"))
    return case.judge()


def origins(folder: Path, *tensors: str) -> list[str]:
    return [str(finding.comparison.id) for finding in judge(folder, *tensors).findings]


def modules(folder: Path, *tensors: str) -> list[str]:
    return [finding.module for finding in judge(folder, *tensors).findings]


def test_a_module_with_right_inputs_and_a_wrong_output_is_the_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/a/input",
        "0/0/a/output",
        "0/0/b/input",
        "!0/0/b/output",
        "!0/0/c/input",
        "!0/0/c/output",
    ) == ["0/0/b/output"]


def test_the_innermost_module_wins(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/./input",
        "0/0/layer/input",
        "0/0/layer.mlp/input",
        "0/0/layer.mlp.fc/input",
        "!0/0/layer.mlp.fc/output",
        "!0/0/layer.mlp/output",
        "!0/0/layer/output",
        "!0/0/./output",
        "!0/0/./loss",
    ) == ["0/0/layer.mlp.fc/output"]


def test_a_parent_whose_children_only_follow_is_wrong_in_its_own_code(tmp_path: Path) -> None:
    """Functional attention, between q, k, v and o."""
    assert origins(
        tmp_path,
        "0/0/attention/input",
        *(f"0/0/attention.{name}/{kind}" for name in "qkv" for kind in ("input", "output")),
        "!0/0/attention.o/input",
        "!0/0/attention.o/output",
        "!0/0/attention/output",
    ) == ["0/0/attention/output"]


def test_a_parents_own_backward_is_an_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/attention/input",
        "0/0/attention/output",
        "0/0/attention/grad_output",
        "0/0/attention.o/grad_output",
        "0/0/attention.o/grad_input",
        "!0/0/attention.q/grad_output",
        "!0/0/attention.q/grad_input",
        "!0/0/attention/grad_input",
        "!0/0/norm/grad_output",
        "!0/-/attention.q.weight/param_grad",
        "0/-/attention.o.weight/param_grad",
    ) == ["0/0/attention/grad_input"]


def test_a_modules_own_code_is_told_by_what_it_passes_on(tmp_path: Path) -> None:
    case, values = Case(tmp_path), draw_tensor(8, 12, seed=3)
    case.add_right("0/0/attention/grad_output")
    spoilt = values.clone()
    spoilt[:, 10:] = draw_tensor(8, 2, seed=4)
    case.add("0/0/attention.q/grad_output", values, change=lambda _: spoilt)
    case.add_wrong("0/0/attention/grad_input")
    [finding] = case.judge().findings
    assert (finding.module, finding.cause.name) == ("attention", CauseName.SOME_ROWS)
    assert finding.cause.sentence == (
        "what enters attention.q is wrong (grad_output): only 2 of 12 indices of dim 1 are wrong: 10-11"
    )


def test_a_modules_own_loss_explains_the_gradients_of_it_and_around_it(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/mlp/grad_output",
        "0/0/mlp.router/grad_output",
        "!0/0/mlp.router/loss.0",
        "!0/0/mlp.router/grad_input",
        "!0/0/mlp/grad_input",
        "!0/-/mlp.router.weight/main_grad",
        "!0/-/mlp.router.weight/param_grad",
    ) == ["0/0/mlp.router/loss.0"]


def test_a_wrong_input_gradient_of_a_right_output_gradient_is_an_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/a/output",
        "0/0/b/output",
        "0/0/b/grad_output",
        "!0/0/b/grad_input",
        "!0/0/a/grad_output",
        "!0/0/a/grad_input",
        "!0/-/a.weight/param_grad",
        "0/-/b.weight/param_grad",
    ) == ["0/0/b/grad_input"]


def test_a_wrong_parameter_gradient_alone_is_an_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/a/output",
        "0/0/a/grad_output",
        "0/0/a/grad_input",
        "!0/-/a.weight/param_grad",
        "!0/-/a.weight/param_after",
    ) == ["0/-/a.weight/param_grad"]


def test_gradients_follow_from_a_wrong_forward(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/a/output",
        "!0/0/b/output",
        "!0/0/./output",
        "!0/0/./loss",
        "!0/0/./grad_output",
        "!0/0/b/grad_output",
        "!0/0/b/grad_input",
        "!0/0/a/grad_output",
        "!0/-/a.weight/param_grad",
        "!0/-/b.weight/param_grad",
        "!0/-/b.weight/param_after",
    ) == ["0/0/b/output"]


def test_gradients_follow_from_wrong_logits_also_when_the_loss_is_right_by_chance(tmp_path: Path) -> None:
    assert origins(
        tmp_path, "!0/0/head/output", "!0/0/./output", "0/0/./loss", "!0/0/head/grad_output", "!0/0/./grad_output"
    ) == ["0/0/head/output"]


def test_a_wrong_parameter_is_the_origin_rather_than_its_modules_output(tmp_path: Path) -> None:
    found = judge(
        tmp_path,
        "!0/-/layer.fc.weight/param",
        "0/0/layer.fc/input",
        "!0/0/layer.fc/output",
        "!0/0/layer/output",
        "!0/-/layer.fc.weight/param_after",
    ).findings
    assert [(str(finding.comparison.id), finding.module) for finding in found] == [
        ("0/-/layer.fc.weight/param", "layer.fc")
    ]


def test_a_parameter_of_a_module_that_never_ran_belongs_to_the_parent_that_uses_it(tmp_path: Path) -> None:
    tensors = ["0/0/attention/input", "0/0/attention/output"]
    gradient = "!0/-/attention.inner.proj.weight/param_grad"
    assert modules(tmp_path / "right", *tensors, "0/0/attention/grad_output", gradient) == ["attention"]
    wrong_before = ["0/0/loss/output", "0/0/loss/grad_output", "!0/0/loss/grad_input", "!0/0/attention/grad_output"]
    assert modules(tmp_path / "wrong", *tensors, *wrong_before, gradient) == ["loss"]


def test_a_wrong_loss_of_right_logits_is_an_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/head/output",
        "0/0/./output",
        "!0/0/./loss",
        "!0/0/head/grad_output",
        "!0/0/./grad_output",
        "!0/-/head.weight/param_grad",
    ) == ["0/0/./loss"]


def test_a_wrong_gradient_of_a_right_loss_is_the_models_own(tmp_path: Path) -> None:
    assert modules(
        tmp_path, "0/0/head/output", "0/0/./output", "0/0/./loss", "!0/0/head/grad_output", "!0/0/./grad_output"
    ) == ["."]


def test_a_wrong_update_of_right_gradients_is_an_origin(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/-/a.weight/param",
        "0/0/a/output",
        "!0/-/a.weight/param_grad",
        "0/-/a.bias/param_grad",
        "!0/-/a.weight/param_after",
        "!0/-/a.bias/param_after",
    ) == ["0/-/a.weight/param_grad", "0/-/a.bias/param_after"]


def test_two_bugs_in_different_modules_are_two_findings(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/left/input",
        "!0/0/left/output",
        "0/0/right/input",
        "!0/0/right/output",
        "!0/0/join/input",
        "!0/0/join/output",
        "!0/0/./output",
    ) == ["0/0/left/output", "0/0/right/output"]


def test_a_forward_and_a_backward_bug_are_two_findings(tmp_path: Path) -> None:
    assert origins(
        tmp_path,
        "0/0/a/output",
        "!0/0/side/output",
        "0/0/./output",
        "0/0/a/grad_output",
        "!0/0/a/grad_input",
    ) == ["0/0/side/output", "0/0/a/grad_input"]


def test_a_wrong_parameter_of_a_parent_and_a_wrong_child_are_two_findings(tmp_path: Path) -> None:
    assert origins(
        tmp_path, "!0/-/layer.scale/param", "0/0/layer.fc/input", "!0/0/layer.fc/output", "!0/0/layer/output"
    ) == ["0/-/layer.scale/param", "0/0/layer.fc/output"]


def test_several_microbatches_and_slots_of_one_module_are_one_finding(tmp_path: Path) -> None:
    assert origins(tmp_path, "!0/0/a/output.x", "!0/0/a/output.y", "!0/1/a/output.x") == ["0/0/a/output.x"]


def test_a_wrong_input_in_another_microbatch_excuses_nobody(tmp_path: Path) -> None:
    assert origins(
        tmp_path, "0/0/a/input", "!0/0/a/output", "!0/1/a/input", "!0/1/a/output", "0/0/b/input", "0/0/b/output"
    ) == ["0/0/a/output"]


def test_a_module_that_is_fed_its_own_wrong_output_is_the_origin(tmp_path: Path) -> None:
    """Layers that share their weights are one module that is called several times."""
    assert origins(
        tmp_path,
        "0/0/layer/input",
        "!0/0/layer/output",
        "!0/0/layer@1/input",
        "!0/0/layer@1/output",
        "!0/0/./output",
    ) == ["0/0/layer/output"]


def test_the_first_wrong_tensor_is_always_reported(tmp_path: Path) -> None:
    # The residual stream of the model itself is wrong in backward, and the model has no input gradient.
    assert origins(
        tmp_path / "backward",
        "0/0/b/grad_input",
        "!0/0/a/grad_output",
        "!0/0/a/grad_input",
    ) == ["0/0/a/grad_output"]
    # One branch is wrong in the parent's own code, another in a module: the second must not hide the first.
    assert origins(
        tmp_path / "branches",
        "!0/0/left/input",
        "!0/0/left/output",
        "0/0/right/input",
        "!0/0/right/output",
        "!0/0/./output",
    ) == ["0/0/left/input", "0/0/right/output"]


def test_later_steps_follow_from_the_first_wrong_one(tmp_path: Path) -> None:
    assert origins(tmp_path, "0/0/a/output", "!0/-/a.weight/param_after", "!1/-/a.weight/param", "!1/0/a/output") == [
        "0/-/a.weight/param_after"
    ]


def test_names_that_only_begin_alike_are_not_inside_each_other(tmp_path: Path) -> None:
    assert origins(tmp_path, "0/0/fc/input", "!0/0/fc/output", "0/0/fc2/input", "!0/0/fc2/output") == [
        "0/0/fc/output",
        "0/0/fc2/output",
    ]


def test_a_finding_counts_what_follows_and_knows_the_source(tmp_path: Path) -> None:
    (finding,) = judge(tmp_path, "0/0/a/output", "!0/0/b/output", "!0/0/c/input", "!0/0/c/output").findings
    assert finding.num_after == 2
    assert finding.source == "model.py:1"


@pytest.mark.parametrize("verdict", ["gap", "missing"])
def test_what_is_not_judged_is_no_origin(tmp_path: Path, verdict: str) -> None:
    case = Case(tmp_path)
    case.add_trusted("0/0/a/output", draw_tensor(4, 8))
    if verdict == "gap":
        case.candidate.record_parts("0/0/a/output", draw_tensor(4, 8), "a b/tp", ranks=[0])
    assert case.judge().findings == ()


def test_modules_that_the_candidate_never_runs_are_the_cause(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/block/input", "0/0/block.first/input", "0/0/block.first/output", "0/-/block.mlp/buffer")
    for name in ("0/0/block.mlp/input", "0/0/block.mlp.fc1/output", "0/0/block.mlp/output"):
        case.add_trusted(name, draw_tensor(4, 8))
    case.add_wrong("0/0/block/output")
    case.add_trusted("0/-/block.mlp.fc1.weight/param_grad", draw_tensor(4, 8))
    case.add_wrong("0/-/block.mlp.fc1.weight/param_after")
    found = case.judge().findings
    assert [(f.module, f.cause.name, f.cause.sentence) for f in found] == [
        ("block", CauseName.SKIPPED, "the candidate never runs block.mlp")
    ]


def test_a_module_that_hands_over_another_input_is_told_what_it_hands_over(tmp_path: Path) -> None:
    case, first, second = Case(tmp_path), draw_tensor(4, 8, seed=1), draw_tensor(4, 8, seed=2)
    case.add("0/0/layers.0/input", first)
    case.add("0/0/layers.0/output", second)
    case.add("0/0/layers.1/input", second, change=lambda _: first)
    case.add_wrong("0/0/layers.1/output", "0/0/./output")
    finding = case.judge().findings[0]
    assert (finding.module, finding.cause.name) == (".", CauseName.OTHERS_VALUES)
    assert finding.cause.sentence.startswith("what enters layers.1 is wrong (input): the candidate holds")


def test_replicas_that_differ_because_of_what_was_handed_over_are_told_so(tmp_path: Path) -> None:
    case, full, other = Case(tmp_path), draw_tensor(4, 8, seed=1), draw_tensor(4, 8, seed=2)
    case.add("0/0/./output", full)
    case.add_trusted("0/0/gate/grad_output", full)
    case.add_trusted("0/0/./grad_input", other)
    for rank, share in enumerate((0.25, 0.75)):
        case.candidate.record(rank, "0/0/gate/grad_output", share * full, "...")
        case.candidate.record(rank, "0/0/./grad_input", other + share * full, "...")
    finding = case.judge().findings[0]
    assert (finding.module, finding.cause.name, finding.cause.axis) == (".", CauseName.MISSING_ALL_REDUCE, "tp")
    assert finding.cause.sentence.startswith("what enters gate is wrong (grad_output): replicas differ and sum")


def test_a_buffer_that_a_step_left_wrong_is_its_modules_own(tmp_path: Path) -> None:
    found = judge(
        tmp_path,
        "0/-/block.norm.running_var/buffer",
        "0/0/block/input",
        "0/0/block.norm/input",
        "0/0/block.norm/output",
        "0/0/block/output",
        "0/-/block.norm.weight/param_grad",
        "!0/-/block.norm.running_var/buffer_after",
        "!1/-/block.norm.running_var/buffer",
    ).findings
    assert [(str(finding.comparison.id), finding.module) for finding in found] == [
        ("0/-/block.norm.running_var/buffer_after", "block.norm")
    ]


@pytest.mark.parametrize("first", ["0/-/norm.running_var/buffer", "0/0/norm@1/input", "0/0/before/output"])
def test_a_buffer_after_a_step_follows_from_what_it_is_made_from(tmp_path: Path, first: str) -> None:
    input_id = "!0/0/norm/input" if first.startswith("0/0/before") else "0/0/norm/input"
    found = origins(tmp_path, f"!{first}", input_id, "0/0/norm/output", "!0/-/norm.running_var/buffer_after")
    assert found == [first]


def test_a_modules_output_tells_of_its_buffer_too(tmp_path: Path) -> None:
    assert origins(
        tmp_path, "0/0/norm/input", "!0/0/norm/output", "!0/-/norm.running_var/buffer_after", "0/0/./output"
    ) == ["0/0/norm/output"]


# All gradients that are wrong for one cause are one finding.


NAMES = tuple(f"layers.{i}.fc" for i in range(4))


def gradients(folder: Path, *factors: float) -> Case:
    """Outputs and activation gradients that are right, and a gradient for each factor."""
    case = Case(folder, "dp=2")
    for i, name in enumerate(NAMES):
        for kind in ("input", "output", "grad_output"):
            case.add(f"0/0/{name}/{kind}", draw_tensor(4, 8, seed=i))
    for i, factor in enumerate(factors):
        name, full = f"0/-/{NAMES[i]}.weight/param_grad", draw_tensor(4, 8, seed=20 + i)
        case.add_trusted(name, full)
        case.candidate.record_parts(name, factor * full)
    return case


def test_one_factor_on_all_gradients_is_one_finding(tmp_path: Path) -> None:
    [finding] = gradients(tmp_path, 2.0, 2.0, 2.0, 2.0).judge().findings
    words = "in all 4 parameter gradients the candidate is 2 x the reference: scaled by dp (dp=2)"
    assert finding.cause.sentence.startswith(words)
    assert (finding.cause.name, finding.cause.axis) == (CauseName.DOUBLE_REDUCTION, "dp")
    assert str(finding.comparison.id) == "0/-/layers.0.fc.weight/param_grad"
    assert finding.source == ""  # no module's own fault
    assert len(finding.covers) == 3


def test_a_gradient_that_is_right_or_has_another_factor_keeps_them_apart(tmp_path: Path) -> None:
    assert len(gradients(tmp_path / "right", 2.0, 2.0, 2.0, 1.0).judge().findings) == 3
    assert len(gradients(tmp_path / "other", 0.3, 0.3, 0.3, 0.7).judge().findings) == 4


def test_gradients_that_nothing_explains_are_one_finding_too(tmp_path: Path) -> None:
    case = gradients(tmp_path)
    for i, name in enumerate(NAMES):
        case.add(
            f"0/-/{name}.weight/param_grad", draw_tensor(4, 8, seed=i), change=lambda x: x + draw_tensor(4, 8, seed=77)
        )
    [finding] = case.judge().findings
    words = "all 4 parameter gradients are wrong, and no known pattern explains the difference"
    assert finding.cause.sentence == words
    assert finding.cause.evidence[-1].startswith("activation gradients are right")


def test_gradients_after_something_wrong_are_left_as_they_are(tmp_path: Path) -> None:
    case = gradients(tmp_path, 2.0, 2.0)
    case.add_wrong("0/0/head/output")
    assert len(case.judge().findings) == 3


def test_isolation_does_not_bring_them_back(tmp_path: Path) -> None:
    ordinary = gradients(tmp_path / "a", 2.0, 2.0, 2.0, 2.0).judge()
    alone = gradients(tmp_path / "b", 2.0, 2.0, 2.0, 1.0).judge()
    assert len(alone.findings) == 3
    [finding] = combine(ordinary, alone).findings
    assert finding.alone


def test_a_zero_gradient_does_not_speak(tmp_path: Path) -> None:
    case = gradients(tmp_path, 2.0, 2.0)
    case.add("0/-/layers.2.fc.weight/param_grad", torch.zeros(4, 8))
    assert len(case.judge().findings) == 1
