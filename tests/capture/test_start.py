"""Start of a session: what a script and the command line declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ttrace.attach import PLAN_VARIABLE, Session, attach
from ttrace.capture.parts import Declarations
from ttrace.capture.plan import Plan
from ttrace.errors import CaptureError
from ttrace.judge.tolerance.run_to_run import is_repeated
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace

OF_SCRIPT, OF_COMMAND = {"*.fc1/output": "seq hidden/tp"}, {"*.fc1/output": "seq/tp hidden"}


def test_rules_of_the_command_line_are_taken_where_the_script_states_none(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path, rules=OF_COMMAND)
    declared = Declarations().or_planned(plan)
    assert [str(rule.layout) for rule in declared.rules.rules] == list(OF_COMMAND.values())


def test_rules_of_the_script_and_of_the_command_line_are_refused(tmp_path: Path) -> None:
    declared = Declarations(rules=Rules.of(OF_SCRIPT))
    assert declared.or_planned(Plan(out=tmp_path)).rules is declared.rules
    with pytest.raises(CaptureError, match=r"the command line \(--rules\).*Leave one of them out"):
        declared.or_planned(Plan(out=tmp_path, rules=OF_COMMAND))


# Several plans in one process: each begins where the first began.


class Counting(nn.Module):
    """Module with running statistics, which a step changes, and with a counter in a buffer that it replaces."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        out: torch.Tensor = self.norm(self.linear(x))
        return out


@contextmanager
def training(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[Callable[[], Session]]:
    """Start a script with this plan, an echo and a twin; each call of the yielded function is one iteration."""
    known = {"reference": folder / "reference", **settings}
    then = (
        Plan.model_validate({"out": folder / "echo", "role": "echo", **known}),
        Plan.model_validate({"out": folder / "twin-1", "role": "twin", "twin": 1, **known}),
    )
    Plan.model_validate({"out": folder / "reference", "then": then, **settings}).save(folder / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(folder / "plan.json"))
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    session = attach(model, optimizer)

    def iteration() -> Session:
        with session.step():
            optimizer.zero_grad()
            model(session.batch(torch.randn(16, 8))).square().mean().backward()
            optimizer.step()
        schedule.step()
        return session

    yield iteration
    session.close()


@pytest.mark.parametrize("parameters", ["generated", "own"])
def test_an_echo_is_the_reference_bit_for_bit_and_a_twin_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str
) -> None:
    with training(tmp_path, monkeypatch, parameters=parameters) as iteration:
        iteration()
        iteration()
        with pytest.raises(SystemExit):
            iteration()
    reference, echo, twin = (Trace(tmp_path / name) for name in ("reference", "echo", "twin-1"))
    assert is_repeated(reference, echo)
    assert reference.shards.keys() == twin.shards.keys()
    assert not is_repeated(reference, twin)


def test_what_cannot_be_brought_back_shows_in_the_echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(tmp_path, monkeypatch, num_steps=2) as iteration:  # the schedule's own counter is not ours
        for _ in range(5):
            iteration()
        with pytest.raises(SystemExit):
            iteration()
    assert not is_repeated(Trace(tmp_path / "reference"), Trace(tmp_path / "echo"))


def test_a_script_may_stop_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(tmp_path, monkeypatch) as iteration:
        iteration().close()
    assert Trace(tmp_path / "reference").ranks[0].end is not None
