"""Isolation replaces what enters modules, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.reason import describe
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.generate import Normal, Signed
from zoo.harness.runs import SimulatedRank


class Scaled(nn.Module):
    """Two linear layers, a table that no gradient goes through, and a wrapper whose output is its inner module's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
        self.inner = Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.inner(self.first(x), torch.full((8,), 3.0)))
        return out


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * table


def trace_step(
    out: Path,
    *,
    model: Scaled | Spectral | None = None,
    wrong: float = 1.0,
    wrong_grad: float = 1.0,
    **settings: object,
) -> Trace:
    torch.manual_seed(0)
    model = Scaled() if model is None else model
    model.first.register_forward_hook(lambda _module, _args, output: output * wrong)
    model.first.weight.register_hook(lambda gradient: gradient * wrong_grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.model_validate({"out": out, "stop": False, **settings})
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    with session.step():
        x = session.batch(torch.randn(16, 8))
        F.mse_loss(model(x), torch.ones(16, 8)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    session.close()
    return Trace(out)


def read_tensor(trace: Trace, text: str) -> torch.Tensor:
    return trace.shards[TensorId.parse(text)][0].tensor()


@pytest.fixture
def ordinary(tmp_path: Path) -> Trace:
    return trace_step(tmp_path / "ordinary")


def trace_isolated(ordinary: Trace, name: str, **settings: object) -> Trace:
    known = {"isolated": True, "reference": ordinary.folder, **settings}
    return trace_step(Path(str(ordinary.folder)).parent / name, **known)  # type: ignore[arg-type]


def test_a_modules_output_depends_on_no_other_module(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    wrong = trace_isolated(ordinary, "wrong", wrong=2.0)
    for site in ("0/0/first/output", "0/0/inner/output", "0/0/last/output", "0/0/inner/grad_input"):
        assert read_tensor(right, site).equal(read_tensor(wrong, site)), site
    # What arrived is recorded, so the wrong code between two right modules shows.
    assert not read_tensor(right, "0/0/inner/input").equal(read_tensor(wrong, "0/0/inner/input"))


def test_inputs_have_the_references_mean_and_spread(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    source = right.shards[TensorId.parse("0/0/inner/input")][0].record.values
    seen = read_tensor(ordinary, "0/0/inner/input").double()
    assert isinstance(source, Normal)
    assert source.mean == pytest.approx(float(seen.mean()))
    assert source.std == pytest.approx(float(seen.std(correction=0)))


def test_a_table_is_not_generated(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    assert right.shards[TensorId.parse("0/0/inner/input.1")][0].record.values is None
    assert bool((read_tensor(right, "0/0/inner/output").abs() <= 3.0).all())


def test_an_outer_module_and_the_inner_one_whose_output_it_returns_have_their_own_gradients(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    outer, inner = (right.shards[TensorId.parse(f"0/0/{name}/grad_output")][0] for name in ("last", "last.0"))
    assert outer.record.values is not None
    assert inner.record.values is not None
    x = right.shards[TensorId.parse("0/0/last.0/input")][0]
    assert x.record.values is not None
    # The weight's gradient comes from the inner module's own generated gradient and input.
    made = [generate_again(right, shard.id) for shard in (inner, x)]
    assert read_tensor(right, "0/-/last.0.weight/param_grad").allclose(made[0].T @ made[1], rtol=1e-5, atol=1e-7)


def generate_again(trace: Trace, tensor_id: TensorId) -> torch.Tensor:
    from ttrace.values.generate import generate_values

    record = trace.shards[tensor_id][0].record
    assert record.values is not None
    assert record.region is not None
    return generate_values(tensor_id, record.region, dtype=record.dtype, distribution=record.values)


def test_the_optimizer_gets_generated_gradients_that_are_nowhere_near_zero(ordinary: Trace) -> None:
    right, wrong = trace_isolated(ordinary, "right"), trace_isolated(ordinary, "wrong", wrong_grad=2.0)
    site = "0/-/first.weight"
    assert not read_tensor(right, f"{site}/param_grad").equal(read_tensor(wrong, f"{site}/param_grad"))
    assert read_tensor(right, f"{site}/param_after").equal(read_tensor(wrong, f"{site}/param_after"))
    source = right.shards[TensorId.parse(f"{site}/param_grad")][0].record.values
    assert isinstance(source, Signed)
    step = (read_tensor(right, f"{site}/param") - read_tensor(right, f"{site}/param_after")) / 0.1
    assert bool((step.abs() > 0.4 * source.size).all())


def test_gradients_are_replaced_before_their_norm_is_taken(ordinary: Trace) -> None:
    right, wrong = trace_isolated(ordinary, "right"), trace_isolated(ordinary, "wrong", wrong_grad=2.0)
    assert read_tensor(right, "0/-/./grad_norm").equal(read_tensor(wrong, "0/-/./grad_norm"))


def test_twins_nudge_every_modules_inputs(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    twin = trace_isolated(right, "twin", role="twin", twin=1, full=("*",))
    for site in ("0/0/first/output", "0/0/last/output", "0/0/last/grad_input", "0/-/first.weight/param_grad"):
        a, b = read_tensor(right, site).double(), read_tensor(twin, site).double()
        assert 1e-9 < float((a - b).norm() / a.norm()) < 1e-5, site


def test_a_candidate_divides_gradients_by_the_factor_that_is_still_to_come(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right")
    candidate = trace_isolated(right, "candidate", role="candidate", grad_factor=0.5)
    a, b = (read_tensor(trace, "0/0/last/grad_input") for trace in (right, candidate))
    assert b.allclose(2 * a, rtol=1e-5)


@pytest.mark.own_defaults
def test_what_isolation_computes_is_no_call_of_the_module(ordinary: Trace) -> None:
    right = trace_isolated(ordinary, "right", inside=("inner",))
    calls = [tensor_id.site.slot for tensor_id in right.shards if tensor_id.kind is Kind.CALL]
    assert calls == ["tanh.0", "mul.0"]


class Spectral(nn.Module):
    """Module that rotates by a complex table, and has complex activations with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rotated, self.last = nn.Linear(8, 8), Rotated(), nn.Sequential(Conjugated())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(4.0).expand(16, 4)
        table = torch.polar(torch.ones(16, 4), angles)
        rotated = self.rotated(torch.view_as_complex(self.first(x).view(16, 4, 2)), table)
        return torch.view_as_real(self.last(rotated).resolve_conj()).flatten(1)


class Rotated(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert x.is_complex()
        assert table.is_complex()
        return x * table


class Conjugated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).conj()


@pytest.mark.own_defaults
def test_complex_inputs_stay_complex_and_keep_their_gradients(tmp_path: Path) -> None:
    ordinary = trace_step(tmp_path / "ordinary", model=Spectral())
    right = trace_step(tmp_path / "right", model=Spectral(), isolated=True, reference=ordinary.folder)
    twin = trace_step(
        tmp_path / "twin", model=Spectral(), isolated=True, reference=right.folder, role="twin", twin=1, full=("*",)
    )
    for trace in (right, twin):
        assert not list(trace.problems())
        assert set(trace.shards) == set(ordinary.shards)
    record = right.shards[TensorId.parse("0/0/rotated/input")][0].record
    assert record.values is not None, "an activation is generated"
    x = torch.view_as_complex(generate_again(right, record.id))
    table = torch.view_as_complex(read_tensor(right, "0/0/rotated/input.1"))
    assert torch.view_as_complex(read_tensor(right, "0/0/rotated/output")).equal(x * table), "and a table is replayed"
    a, b = read_tensor(right, "0/0/rotated/grad_input").double(), read_tensor(twin, "0/0/rotated/grad_input").double()
    assert 1e-9 < float((a - b).norm() / a.norm()) < 1e-5, "a twin nudges what enters"


# Decisions are recorded as this run would take them, and replayed from the reference.


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


def trace_experts(out: Path, *, nudge: float = 0.0, **settings: Any) -> Trace:
    torch.manual_seed(0)
    model = Moe()
    model.router.nudge = nudge
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = TracingSession(SessionParts(Plan(out=out, stop=False, **settings), model, optimizer, SimulatedRank()))
    with session.step():
        model(session.batch(torch.randn(TOKENS, HIDDEN))).square().mean().backward()
        optimizer.step()
    session.close()
    return Trace(out)


def judge(folder: Path, **settings: Any) -> Judgement:
    reference = trace_experts(folder / "reference")
    known: dict[str, Any] = {"reference": reference.folder}
    twins = [trace_experts(folder / f"twin-{i}", role="twin", twin=i, **known) for i in (1, 2, 3)]
    return check(reference, twins, trace_experts(folder / "candidate", role="candidate", **known, **settings))


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
        session = TracingSession(SessionParts(plan, model, None, SimulatedRank()))
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
    trace_experts(tmp_path / "reference")
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
    session = TracingSession(SessionParts(Plan(out=out, stop=False), model, None, SimulatedRank()))
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
