"""Decisions are recorded as this run would take them, and replayed from the reference."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.capture.plan import Plan
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.sentences import describe
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace
from zoo.harness.runs import SimulatedRank

TOKENS, HIDDEN, EXPERTS = 64, 16, 8


class Router(nn.Module):
    """Router whose scores have many ties, so that the least change leads to other choices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS // 2, HIDDEN))
        self.nudge = 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (x @ self.weight.T).repeat_interleave(2, -1)
        scores = scores + self.nudge * torch.arange(EXPERTS).flip(0)
        chosen = scores.softmax(-1).topk(1)
        return chosen.values, chosen.indices


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        return torch.einsum("th,tkhe,tk->te", x, self.experts[ids], weights)


def trace_step(out: Path, *, nudge: float = 0.0, **settings: Any) -> Trace:
    torch.manual_seed(0)
    model = Moe()
    model.router.nudge = nudge
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = TracingSession(Plan(out=out, stop=False, **settings), model, optimizer, SimulatedRank(), Rules())
    with session.step():
        model(session.batch(torch.randn(TOKENS, HIDDEN))).square().mean().backward()
        optimizer.step()
    session.close()
    return Trace(out)


def judge(folder: Path, **settings: Any) -> Judgement:
    reference = trace_step(folder / "reference")
    known: dict[str, Any] = {"reference": reference.folder}
    twins = [trace_step(folder / f"twin-{i}", role="twin", twin=i, **known) for i in (1, 2, 3)]
    return check(reference, twins, trace_step(folder / "candidate", role="candidate", **known, **settings))


def find_comparison(judgement: Judgement, text: str) -> Any:
    return next(c for c in judgement.comparisons if c.id == TensorId.parse(text))


def test_a_tie_that_falls_the_other_way_is_innocent(tmp_path: Path) -> None:
    judgement = judge(tmp_path, nudge=3e-8)
    choice = find_comparison(judgement, "0/0/router/decision.0")
    assert choice.verdict is Verdict.PASS
    assert "within rounding of a tie" in describe(choice.why)
    assert judgement.exit is Exit.PASSED, [c for c in judgement.comparisons if c.verdict is not Verdict.PASS]


def test_without_replay_the_same_tie_changes_everything_after_it(tmp_path: Path) -> None:
    judgement = judge(tmp_path, nudge=3e-8, decisions="own")
    assert find_comparison(judgement, "0/0/./output").verdict is Verdict.FAIL


def test_a_choice_against_the_scores_is_found(tmp_path: Path) -> None:
    judgement = judge(tmp_path, nudge=0.1)
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].module == "router"
    choice = find_comparison(judgement, "0/0/router/decision.0")
    assert choice.verdict is Verdict.FAIL
    assert "in score; rounding explains" in describe(choice.why)


def test_replayed_weights_keep_their_gradient(tmp_path: Path) -> None:
    judgement = judge(tmp_path, nudge=3e-8)
    assert find_comparison(judgement, "0/-/router.weight/param_grad").verdict is Verdict.PASS


class ChoosesTwice(nn.Module):
    """Chooses for half of the rows at a time, or for all rows at once."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, EXPERTS)
        self.num_parts = num_parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.topk(2).values for part in self.inner(x).chunk(self.num_parts)])


def test_a_choice_of_another_shape_is_not_replayed(tmp_path: Path) -> None:
    for num_parts, settings in ((2, {}), (1, {"role": "candidate", "reference": tmp_path / "2"})):
        torch.manual_seed(0)
        model = ChoosesTwice(num_parts)
        plan = Plan.model_validate({"out": tmp_path / str(num_parts), "stop": False, **settings})
        session = TracingSession(plan, model, None, SimulatedRank(), Rules())
        with session.step():
            model(session.batch(torch.randn(TOKENS, HIDDEN))).sum().backward()
        session.close()
    output = TensorId.parse("0/0/./output")
    halves, whole = (ReferenceTrace(tmp_path / name).tensor(output) for name in "21")
    assert halves is not None
    assert whole is not None
    assert torch.equal(halves, whole)


def list_clipping_functions() -> tuple[object, ...]:
    """List the functions that clip, under all their names, and those that they call."""
    names = (nn.utils.get_total_norm, nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_norm_)
    inner = [cell.cell_contents for name in names for cell in name.__closure__ or ()]
    return (*names, nn.utils.clip_grad._get_total_norm, *inner)


def test_torch_is_as_it_was_after_the_step(tmp_path: Path) -> None:
    before = torch.topk, torch.argmax, *list_clipping_functions()
    trace_step(tmp_path / "reference")
    assert (torch.topk, torch.argmax, *list_clipping_functions()) == before
    assert "topk" not in torch.Tensor.__dict__
    assert torch.tensor([1.0, 3.0, 2.0]).topk(1).indices.tolist() == [1]
    assert int(torch.tensor([1.0, 3.0, 2.0]).argmax()) == 1


class Chooser(nn.Module):
    def __init__(self, choose: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.choose(x)
        return x


def record_decisions(out: Path, choose: Callable[[torch.Tensor], object]) -> list[str]:
    model = Chooser(choose)
    session = TracingSession(Plan(out=out, stop=False), model, None, SimulatedRank(), Rules())
    with session.step():
        model(torch.randn(4, 4))
    session.close()
    return [t.site.slot for t in Trace(out).shards if t.kind is Kind.DECISION]


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: torch.topk(input=x, k=2),
        lambda x: torch.topk(x, k=2, axis=-1),  # type: ignore[call-arg]  # NumPy's name of it
        lambda x: x.topk(k=2, dim=1, largest=False),
        lambda x: torch.argmax(input=x, dim=-1),
        lambda x: torch.argmax(x, axis=1),  # type: ignore[call-arg]  # the same
        lambda x: x.argmax(dim=1, keepdim=True),
    ],
)
def test_what_is_chosen_from_may_be_given_by_name(tmp_path: Path, choose: Callable[[torch.Tensor], object]) -> None:
    assert record_decisions(tmp_path, choose) == ["0.scores", "0"]


@pytest.mark.parametrize("choose", [lambda x: x.topk(2), lambda x: torch.topk(x, 2), lambda x: x.argmax(-1)])
def test_under_a_default_device_a_choice_is_recorded_once(
    tmp_path: Path, choose: Callable[[torch.Tensor], object]
) -> None:
    """It is a `__torch_function__` mode, and torch calls methods again inside it."""
    with torch.device("cpu"):
        assert record_decisions(tmp_path, choose) == ["0.scores", "0"]


def in_another_thread(x: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: x.detach().topk(2))
    thread.start()
    thread.join()


def test_another_threads_choice_is_not_the_running_modules(tmp_path: Path) -> None:
    assert record_decisions(tmp_path, in_another_thread) == []


@pytest.mark.parametrize("dim", [0, 1])
def test_a_choice_along_the_last_dim_only_is_a_decision(tmp_path: Path, dim: int) -> None:
    found = record_decisions(tmp_path, lambda x: (x.argmax(dim), x.topk(1, dim=dim)))
    assert len(found) == (4 if dim == 1 else 0)
