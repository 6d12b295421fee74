"""What a step left is read at its end: everything that changes parameters counts, whoever does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm  # by name, as scripts do

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import CauseName, Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace

Update = Callable[[nn.Module, Any], None]


def step(_: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def make_adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})


def trace_step(plan: Plan, update: Update, make_optimizer: Callable[[nn.Module], Any]) -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = make_optimizer(model)
    session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
    with session.step():
        x, y = session.batch((torch.randn(16, 4), torch.randn(16, 4)))
        nn.functional.mse_loss(model(x), y).backward()
        update(model, optimizer)
    return Trace(plan.out)


def judge(
    folder: Path,
    update: Update,
    make_optimizer: Callable[[nn.Module], Any] = make_adam,
    *,
    reference: Update = step,
    reference_optimizer: Callable[[nn.Module], Any] = make_adam,
) -> Judgement:
    """Judge a candidate that updates in another way than the reference does."""
    plan = Plan(out=folder / "reference", stop=False)
    known = plan.model_copy(update={"reference": plan.out})
    trusted = trace_step(plan, reference, reference_optimizer)
    twins = []
    for number in (1, 2, 3):
        as_twin = {"out": folder / f"twin-{number}", "role": "twin", "twin": number}
        twins.append(trace_step(known.model_copy(update=as_twin), reference, reference_optimizer))
    as_candidate = {"out": folder / "candidate", "role": "candidate"}
    return check(trusted, twins, trace_step(known.model_copy(update=as_candidate), update, make_optimizer))


def test_a_second_step_is_seen(tmp_path: Path) -> None:
    def step_twice(_: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        optimizer.step()

    found = judge(tmp_path, step_twice)
    assert found.findings[0].comparison.id.kind in (Kind.UPDATE, Kind.OPTIM)
    assert "twice" in found.findings[0].cause.sentence or "step 2" in found.findings[0].cause.sentence


def test_a_change_after_the_step_is_seen(tmp_path: Path) -> None:
    def change_after_step(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)

    [finding] = judge(tmp_path, change_after_step).findings
    assert str(finding.comparison.id) == "0/-/0.weight/update"


def test_what_arrives_after_the_step_is_part_of_it(tmp_path: Path) -> None:
    """As in a hand-written sharded optimizer: updated in a copy, brought back when the step is over."""

    def copy_back(model: nn.Module, optimizer: Any) -> None:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        after = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for values in (before, after):
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)

    assert judge(tmp_path, copy_back).exit is Exit.PASSED


def make_several(model: nn.Module, lr: float = 0.01) -> list[torch.optim.Optimizer]:
    first, last = (list(model[at].parameters()) for at in (0, 2))  # type: ignore[index]  # it is a Sequential
    return [torch.optim.AdamW(first, lr=0.01), torch.optim.AdamW(last, lr=lr)]


def step_each(_: nn.Module, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def test_several_optimizers_come_as_a_list(tmp_path: Path) -> None:
    found = judge(tmp_path, step_each, make_several)
    assert found.exit is Exit.PASSED
    assert {"exp_avg", "exp_avg_sq", "step"} <= {c.id.site.slot for c in found.comparisons if c.id.kind is Kind.OPTIM}


def test_other_settings_are_the_cause_of_other_updates(tmp_path: Path) -> None:
    found = judge(tmp_path, step_each, lambda model: make_several(model, lr=0.02))
    assert found.findings[0].comparison.id.name == "2.weight"
    words = "the optimizer's settings differ for 2 parameters: lr 0.02 instead of 0.01"
    assert found.findings[0].cause.sentence == words


def test_settings_are_those_before_the_step(tmp_path: Path) -> None:
    """An engine steps the schedule in its own step; the learning rate of the next step is only noted."""

    def change_rate(_: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02

    found = judge(tmp_path, change_rate)
    assert found.exit is Exit.PASSED
    assert "learning rates of other steps differ: next_lr 0.02 instead of 0.01 for 0.weight and 3 more" in found.notes


def test_a_schedule_between_the_steps_of_two_optimizers_is_no_difference(tmp_path: Path) -> None:
    def change_first(_: nn.Module, optimizers: list[Any]) -> None:
        optimizers[0].step()
        optimizers[0].param_groups[0]["lr"] = 0.02
        optimizers[1].step()

    def change_last(_: nn.Module, optimizers: list[Any]) -> None:
        step_each(_, optimizers)
        optimizers[0].param_groups[0]["lr"] = 0.02

    found = judge(tmp_path, change_first, make_several, reference=change_last, reference_optimizer=make_several)
    assert (found.exit, found.findings) == (Exit.PASSED, ())


def test_momentum_that_the_first_step_does_not_show_is_found(tmp_path: Path) -> None:
    def make_sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

    found = judge(tmp_path, step, lambda model: make_sgd(model, 0.5), reference_optimizer=make_sgd)
    words = "the optimizer's settings differ for 4 parameters: momentum 0.5 instead of 0.9"
    assert [finding.cause.sentence for finding in found.findings] == [words]


def make_decaying(model: nn.Module, *exempt: str) -> torch.optim.Optimizer:
    """Make an optimizer with weight decay for all parameters except some."""
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if name not in exempt], "weight_decay": 0.5},
        {"params": [parameters[name] for name in exempt], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def test_a_parameter_in_the_wrong_group_is_named(tmp_path: Path) -> None:
    """Both sides have the same groups; only their members differ."""
    found = judge(
        tmp_path,
        step,
        lambda model: make_decaying(model, "0.bias"),
        reference_optimizer=lambda model: make_decaying(model, "2.bias"),
    )
    causes = {f.comparison.id.name: f.cause.sentence for f in found.findings}
    assert causes["0.bias"].endswith("0.bias: weight_decay 0 instead of 0.5")
    assert causes["2.bias"].endswith("2.bias: weight_decay 0.5 instead of 0")


def test_settings_of_another_parameter_are_no_cause(tmp_path: Path) -> None:
    def change_after_step(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # type: ignore[index]

    found = judge(
        tmp_path,
        change_after_step,
        lambda model: make_decaying(model, "2.bias"),
        reference_optimizer=lambda model: make_decaying(model),
    )
    causes = {f.comparison.id.name: f.cause.name for f in found.findings}
    assert causes["0.weight"] is not CauseName.OPTIMIZER_SETTINGS


def test_settings_of_the_whole_are_named(tmp_path: Path) -> None:
    found = judge(tmp_path, step, lambda model: make_adam(model, lr=0.02, eps=1e-4))
    assert found.findings[0].cause.sentence.endswith("lr 0.02 instead of 0.01, eps 0.0001 instead of 1e-08")


def clip(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clip_by_hand(model: nn.Module, optimizer: Any) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(0.1 / (norm + 1e-6))
    optimizer.step()


def test_a_clip_by_hand_on_one_side_is_asked_for_and_not_accused(tmp_path: Path) -> None:
    for number, (ours, theirs, who) in enumerate(
        ((clip, clip_by_hand, "candidate"), (clip_by_hand, clip, "reference"))
    ):
        found = judge(tmp_path / str(number), theirs, reference=ours)
        assert found.exit is Exit.UNJUDGED
        assert any(f"the {who} clips by hand, which TTrace does not see" in problem for problem in found.problems)


def test_a_wrong_clip_by_hand_is_accused(tmp_path: Path) -> None:
    def wrong(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        optimizer.step()

    assert judge(tmp_path, wrong, reference=clip).exit is Exit.FOUND


def clip_in_two(model: nn.Module, optimizer: Any, *, first: int = 0) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None][first:]
    norms = torch.stack([get_total_norm([gradient]) for gradient in gradients])  # as the parts of several stages
    clip_grads_with_norm_(model.parameters(), max_norm=0.1, total_norm=norms.norm(), foreach=True)
    optimizer.step()


def test_a_clip_by_a_norm_that_the_script_took_is_seen(tmp_path: Path) -> None:
    found = judge(tmp_path, clip_in_two, reference=clip)
    assert found.exit is Exit.PASSED
    passed = {c.id.kind for c in found.comparisons if c.verdict is Verdict.PASS}
    assert passed >= {Kind.GRAD_NORM, Kind.CLIP, Kind.PARAM_GRAD}


def test_a_wrong_norm_to_clip_by_is_found(tmp_path: Path) -> None:
    found = judge(tmp_path, lambda *both: clip_in_two(*both, first=1), reference=clip_in_two)
    assert found.exit is Exit.FOUND
    assert found.findings[0].comparison.id.kind is Kind.GRAD_NORM


def test_one_rank_is_told(tmp_path: Path) -> None:
    assert any("was torchrun forgotten" in note for note in judge(tmp_path, step).notes)
