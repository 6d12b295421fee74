"""A session replaces what it should, counts right, records everything, and never breaks the training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.data import DataLoader, TensorDataset

import ttrace
from ttrace.capture.parts import Declarations, SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError, LayoutError
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.rules import Rules
from ttrace.trace.reader import Trace
from zoo.harness.gpt import RULES, Gpt
from zoo.harness.runs import SimulatedRank, train

opened: list[TracingSession] = []


@pytest.fixture(autouse=True)
def _close_sessions() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def session(folder: Path, model: nn.Module, **settings: object) -> TracingSession:
    plan = Plan.model_validate({"out": folder / "reference", "stop": False, **settings})
    opened.append(TracingSession(SessionParts(plan, model, None, SimulatedRank())))
    return opened[-1]


def candidate(folder: Path, model: nn.Module, mesh: Mesh, rank: int, rules: dict[str, str]) -> TracingSession:
    plan = Plan(out=folder / "candidate", role="candidate", reference=folder / "reference", stop=False)
    opened.append(
        TracingSession(SessionParts(plan, model, None, SimulatedRank(mesh, rank), Declarations(rules=Rules.of(rules))))
    )
    return opened[-1]


def one_step(tracing: TracingSession, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    with tracing.step():
        loss: torch.Tensor = model(tracing.batch(data)).sum()
        loss.backward()
    return loss


def test_a_step_that_raises_keeps_what_it_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2))
    tracing = session(tmp_path, model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), tracing.step():
        model(torch.ones(1, 2))
    trace = Trace(tmp_path / "reference")
    assert {str(found) for found in trace.shards} >= {"0/-/0.weight/param", "0/0/0/output"}
    assert "incomplete" in next(trace.problems())


def test_a_closed_session_lets_the_model_go(tmp_path: Path) -> None:
    """A process that traces many models, as a sweep of tests does, must not keep them all."""
    model = Gpt()
    train(Plan(out=tmp_path / "reference", stop=False), model, SimulatedRank(), RULES)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_nothing_is_hooked_unless_ttrace_started_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTRACE_PLAN", raising=False)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    tracing = ttrace.attach(model, mesh={"tp": 64}, rules={"nonsense": "is not even read"})
    batch = {"x": torch.ones(1)}
    with tracing.step():
        assert tracing.batch(batch) is batch
    tracing.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model.weight, before)


def test_the_environment_variable_switches_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Plan(out=tmp_path / "reference").save(tmp_path / "plan.json")
    monkeypatch.setenv("TTRACE_PLAN", str(tmp_path / "plan.json"))
    model = nn.Linear(2, 2)
    tracing = ttrace.attach(model)
    with pytest.raises(SystemExit) as end, tracing.step():
        model(torch.ones(1, 2)).sum().backward()
    assert end.value.code == 0
    assert Trace(tmp_path / "reference").ranks[0].end is not None


def test_every_shard_is_made_from_the_same_logical_parameter(tmp_path: Path) -> None:
    whole = Gpt()
    train(Plan(out=tmp_path / "reference", stop=False), whole, SimulatedRank(), RULES)
    reference = Trace(tmp_path / "reference")
    for rank in range(2):
        shard = Gpt(tp=2)
        candidate(tmp_path, shard, Mesh.of(tp=2), rank, RULES)
        for name, part in shard.named_parameters():
            full = reference.shards[TensorId.of(0, None, name, Kind.PARAM)][0].tensor()
            if part.shape == full.shape:
                assert torch.equal(part, full), name
        fc1 = reference.shards[TensorId.parse("0/-/layers.0.mlp.fc1.weight/param")][0].tensor()
        assert torch.equal(shard.get_parameter("layers.0.mlp.fc1.weight"), fc1.chunk(2)[rank])
        qkv = reference.shards[TensorId.parse("0/-/layers.0.attention.qkv.weight/param")][0].tensor()
        expected = torch.cat([part.chunk(2)[rank] for part in qkv.chunk(3)])
        assert torch.equal(shard.get_parameter("layers.0.attention.qkv.weight"), expected)


def test_constant_parameters_get_a_spread_and_others_keep_theirs(tmp_path: Path) -> None:
    norm, linear = nn.LayerNorm(64).requires_grad_(False), nn.Linear(64, 64).requires_grad_(False)
    spread = float(linear.weight.std())
    session(tmp_path, nn.Sequential(norm, linear))
    assert float(norm.weight.std()) == pytest.approx(0.02, rel=0.5)
    assert float(norm.weight.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(norm.bias.abs().max()) > 0
    assert float(linear.weight.std()) == pytest.approx(spread, rel=0.1)


def test_own_parameters_are_kept_on_request(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    session(tmp_path, model, parameters="own")
    assert torch.equal(model.weight, before)


def test_batches_are_generated_and_valid(tmp_path: Path) -> None:
    class Data(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    model = Data()
    tracing = session(tmp_path, model)
    labels = torch.randint(9, (4, 32))
    labels[:, ::3] = -100
    given: dict[str, Any] = {
        "ids": torch.randint(5, (4, 32)),
        "labels": labels,
        "mask": torch.rand(4, 32) < 0.8,
        "positions": torch.arange(32).expand(4, 32),
        "floats": torch.randn(4, 32) * 3 + 1,
        "name": "kept",
    }
    with tracing.step():
        made = tracing.batch(given)
        model(made["floats"])
    assert made["name"] == "kept"
    assert not torch.equal(made["ids"], given["ids"])
    assert set(made["ids"].unique().tolist()) <= set(range(5))
    assert set(made["labels"].unique().tolist()) <= {-100, *range(9)}
    assert bool((made["labels"] == -100).any())
    assert made["mask"].dtype == torch.bool
    assert torch.equal(made["positions"], given["positions"])
    assert float(made["floats"].std()) == pytest.approx(3.0, rel=0.3)


def test_masks_and_labels_are_those_of_a_further_batch_that_has_padding(tmp_path: Path) -> None:
    """The first batches are full; the third one has a short row, whose labels are ignored."""
    mask = torch.ones(8, 64)
    mask[5, 40:] = 0.0
    labels = torch.arange(512).reshape(8, 64) % 7
    labels[mask == 0] = -100
    model = nn.Linear(6, 1)
    tracing = session(tmp_path, model)
    for batch in DataLoader(TensorDataset(torch.randn(8, 6), mask, labels), 2):
        with tracing.step():
            floats, used, targets = tracing.batch(batch)
            model(floats).sum().backward()
        assert torch.equal(used, mask[4:6])
        assert bool((targets == -100).any())
        break


def test_a_candidate_gets_the_references_batch(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    one_step(session(tmp_path, model), model, torch.randn(6, 4))
    reference = Trace(tmp_path / "reference").shards[TensorId.parse("0/0/./batch")][0].tensor()
    for rank in range(2):
        other = nn.Linear(4, 4)
        tracing = candidate(tmp_path, other, Mesh.of(sp=2), rank, {"./batch": "batch/sp hidden"})
        with tracing.step():
            local = tracing.batch(torch.randn(3, 4))
        assert torch.equal(local, reference[3 * rank : 3 * rank + 3])


def test_data_with_a_structure_is_replayed_from_the_reference(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    tracing = session(tmp_path, model)
    positions = torch.arange(6)
    with tracing.step():
        assert torch.equal(tracing.batch(positions), positions)
        model(torch.randn(6, 4)).sum().backward()
    other = candidate(tmp_path, nn.Linear(4, 4), Mesh.of(cp=2), 1, {"./batch": "seq/cp"})
    with other.step():
        assert torch.equal(other.batch(torch.zeros(3, dtype=torch.long)), positions[3:])


def test_ranks_along_dp_run_microbatches_of_their_own(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    one_step(session(tmp_path, model), model, torch.randn(6, 4))
    for rank in range(2):
        other = nn.Linear(4, 4)
        tracing = candidate(tmp_path, other, Mesh.of(dp=2), rank, {})
        with tracing.step():
            for _ in range(2):
                other(torch.randn(6, 4)).sum().backward()
    trace = Trace(tmp_path / "candidate")
    outputs = {t.microbatch: [s.coord.rank for s in shards] for t, shards in trace.shards.items() if t.kind == "output"}
    assert outputs == {0: [0], 2: [0], 1: [1], 3: [1]}


def test_dropout_is_switched_off_and_said_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    session(tmp_path, model)
    assert model[1].p == 0.0
    assert Trace(tmp_path / "reference").dropout == ("1",)


def test_tied_weights_have_one_id_and_frozen_ones_no_gradient(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.frozen(self.words(ids)))
            return out

    model = Tied()
    one_step(session(tmp_path, model), model, torch.randint(8, (2, 5)))
    trace = Trace(tmp_path / "reference")
    assert trace.aliases == {"head.weight": "words.weight"}
    named = {(t.name, t.kind.value) for t in trace.shards}
    assert ("words.weight", "param_grad") in named
    assert not {name for name, _ in named} & {"head.weight"}
    assert ("frozen.weight", "param") in named
    assert ("frozen.weight", "param_grad") not in named


def test_a_copy_of_a_tied_weight_has_the_references_name(tmp_path: Path) -> None:
    """A last pipeline stage holds the embedding as its head's weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.words(ids))
            return out

    model = Tied()
    one_step(session(tmp_path, model), model, torch.randint(8, (2, 5)))
    stage = nn.Module()
    stage.head = nn.Linear(4, 8, bias=False)
    candidate(tmp_path, stage, Mesh.of(pp=2), 1, {})
    assert torch.equal(stage.head.weight, model.words.weight)


def test_a_recording_failure_is_kept_and_the_training_goes_on(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sparse: torch.Tensor = self.fc(x).to_sparse()
            return sparse

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).to_dense().sum()  # type: ignore[no-any-return]

    model = Outer()
    one_step(session(tmp_path, model), model, torch.randn(2, 4))
    problems = list(Trace(tmp_path / "reference").problems())
    assert any(problem.startswith("0/0/inner/output could not be recorded") for problem in problems)
    assert model.inner.fc.weight.grad is not None


def test_twins_nudge_where_numbers_enter_by_about_epsilon(tmp_path: Path) -> None:
    torch.manual_seed(0)
    train(Plan(out=tmp_path / "reference", stop=False), Gpt(), SimulatedRank(), RULES)
    known = {"reference": tmp_path / "reference", "full": ("*",)}
    plan = Plan(out=tmp_path / "twin", role="twin", twin=1, stop=False, **known)  # type: ignore[arg-type]
    train(plan, Gpt(), SimulatedRank(), RULES)
    reference, twin = Trace(tmp_path / "reference"), Trace(tmp_path / "twin")
    for name in ("words", "places"):
        tensor_id = TensorId.parse(f"0/0/{name}/output")
        a, b = (trace.shards[tensor_id][0].tensor().double() for trace in (reference, twin))
        assert float((a - b).norm() / a.norm()) == pytest.approx(torch.finfo(torch.float32).eps, rel=0.5)
    same = [TensorId.parse("0/0/./batch.ids"), TensorId.parse("0/-/head.weight/param")]
    assert all(torch.equal(reference.shards[t][0].tensor(), twin.shards[t][0].tensor()) for t in same)


def test_only_and_skip_choose_what_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one_step(session(tmp_path, model, only=("0",), skip=("*/grad_*",)), model, torch.randn(2, 4))
    sites = {str(t.site) for t in Trace(tmp_path / "reference").shards if t.kind not in (Kind.PARAM, Kind.BATCH)}
    assert sites == {"0/input", "0/output"}


def test_a_rule_that_does_not_fit_is_named_with_the_next_move(tmp_path: Path) -> None:
    model = nn.Linear(6, 8)
    one_step(session(tmp_path, model), model, torch.randn(4, 6))
    with pytest.raises(LayoutError) as error:
        candidate(tmp_path, nn.Linear(6, 3), Mesh.of(tp=2), 0, {"*weight": "out/tp in"})
    assert str(error.value).startswith(
        "weight/param: rule \"*weight\" states 'out/tp in', which cuts dim out over tp=2, but this rank holds shape "
        "(3, 6) of the reference's (8, 6)."
    )


def test_a_parameter_nobody_explains_asks_for_a_rule(tmp_path: Path) -> None:
    model = nn.Linear(6, 8)
    one_step(session(tmp_path, model), model, torch.randn(4, 6))
    with pytest.raises(LayoutError, match=r'Add a rule, for instance \{"weight": "d0/AXIS d1"\}'):
        candidate(tmp_path, nn.Linear(6, 3), Mesh.of(tp=2), 0, {})


def test_gradients_are_read_before_they_are_clipped(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracing = TracingSession(
        SessionParts(Plan(out=tmp_path / "reference", stop=False), model, optimizer, SimulatedRank())
    )
    with tracing.step():
        model(100 * torch.ones(2, 4)).sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = {str(t): shards[0].tensor() for t, shards in Trace(tmp_path / "reference").shards.items()}
    assert torch.equal(found["0/-/weight/param_grad"], before[0])
    assert torch.equal(found["0/-/./grad_norm"], norm)
    assert float(found["0/-/./clip"]) == pytest.approx(1 / float(norm), rel=1e-4)


def test_a_closed_session_leaves_no_hook_behind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(out=tmp_path / "reference", stop=False)
    TracingSession(SessionParts(plan, model, optimizer, SimulatedRank())).close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_candidate_without_a_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="needs the reference's trace"):
        session(tmp_path, nn.Linear(2, 2), role="candidate")


def test_loss_gradients_and_parameters_after_the_step_are_recorded(tmp_path: Path) -> None:
    model = Gpt(num_layers=1)
    train(Plan(out=tmp_path / "reference", stop=False, num_steps=2), model, SimulatedRank(), RULES)
    ids = Trace(tmp_path / "reference").shards
    for step in (0, 1):
        for microbatch in (0, 1):
            assert TensorId.of(step, microbatch, ".", Kind.LOSS) in ids
            assert TensorId.of(step, microbatch, "layers.0.mlp.fc1", Kind.GRAD_INPUT) in ids
        for kind in (Kind.PARAM, Kind.PARAM_GRAD, Kind.PARAM_AFTER):
            assert TensorId.of(step, None, "layers.0.mlp.fc1.weight", kind) in ids


@pytest.mark.parametrize(
    "roots",
    [
        lambda loss: get_gradient_edge(loss),
        lambda loss: [get_gradient_edge(loss)],
        lambda loss: iter([loss]),
    ],
    ids=["one edge", "edges", "iterator"],
)
def test_backward_may_start_from_whatever_torch_accepts(tmp_path: Path, roots: Callable[[torch.Tensor], Any]) -> None:
    """The pipelining of torch 2.15 passes edges of the graph, which have no value."""
    model = nn.Linear(2, 2)
    tracing = session(tmp_path, model)
    with tracing.step():
        loss = model(tracing.batch(torch.ones(1, 2))).sum()
        torch.autograd.backward(roots(loss))
    ids = Trace(tmp_path / "reference").shards
    assert model.weight.grad is not None
    assert TensorId.of(0, None, "weight", Kind.PARAM_GRAD) in ids
    assert (TensorId.of(0, 0, ".", Kind.LOSS) in ids) == (not isinstance(roots(loss), (list, GradientEdge)))


class Rotating(nn.Module):
    """Module that rotates pairs of numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(4, 4)
        self.rotation = Polar()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = torch.view_as_complex(x.view(-1, 4, 2)) * self.rotation(self.angles(x[..., :4]))
        return torch.view_as_real(rotated)


class Polar(nn.Module):
    def forward(self, angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(torch.ones_like(angles), angles)


def test_complex_numbers_are_recorded_as_real_ones(tmp_path: Path) -> None:
    model = Rotating()
    tracing = session(tmp_path, model)
    one_step(tracing, model, torch.randn(3, 8))
    tracing.close()
    trace = Trace(tmp_path / "reference")
    assert not list(trace.problems())
    for kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT):
        shard = trace.shards[TensorId.of(0, 0, "rotation", kind)][0]
        assert shard.record.shape == (3, 4, 2)
        assert shard.record.region is not None
        assert shard.record.region.is_whole


class Sorted(nn.Module):
    """Module that passes its rows to another module in another order, as a router does."""

    def __init__(self, order: list[int], size: int) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), nn.Linear(2, 3)
        self.order, self.size = torch.tensor(order), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = ttrace.holds(self.first(x)[self.order - self.order.min()], self.order, self.size)
        out: torch.Tensor = self.inner(rows)
        return out


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT])
def test_what_an_input_holds_its_outputs_and_gradients_hold(tmp_path: Path, kind: Kind) -> None:
    model = Sorted([2, 0, 1], 3)
    one_step(session(tmp_path, model), model, torch.randn(3, 2))
    opened[-1].close()
    record = Trace(tmp_path / "reference").shards[TensorId.of(0, 0, "inner", kind)][0].record
    assert record.region is not None
    assert record.region.dims[0] == ((2, 3), (0, 2))
    assert record.source in (LayoutSource.HOLDS, LayoutSource.HOLDS_OF_INPUT)


def test_ranks_that_hold_other_rows_make_up_the_references_tensor(tmp_path: Path) -> None:
    model = Sorted([2, 0, 3, 1], 4)
    one_step(session(tmp_path, model), model, torch.randn(4, 2))
    opened[-1].close()
    for rank, order in enumerate(([1, 0], [2, 3])):
        part = Sorted(order, 4)
        one_step(candidate(tmp_path, part, Mesh.of(ep=2), rank, {}), part, torch.randn(2, 2))
        opened[-1].close()
    tensor_id = TensorId.of(0, 0, "inner", Kind.OUTPUT)
    ours, theirs = (LogicalTensor.of(Trace(tmp_path / side), tensor_id) for side in ("reference", "candidate"))
    assert ours is not None
    assert theirs is not None
    assert theirs.coverage().is_tiling
    assert measure(ours, theirs)[0].error < 1e-6


def test_data_of_their_own_do_not_make_ranks_cut_a_batch(tmp_path: Path) -> None:
    """Along dp ranks run other microbatches; of two axes of one size only ep can have cut this one."""
    tracing = session(tmp_path, nn.Linear(2, 3))
    with tracing.step():
        for _ in range(2):
            tracing.batch(torch.randn(4, 2))
    opened[-1].close()
    tracing = candidate(tmp_path, nn.Linear(2, 3), Mesh.of(dp=2, ep=2), 1, {})
    with tracing.step():
        half = tracing.batch(torch.randn(2, 2))
    full = Trace(tmp_path / "reference").shards[TensorId.of(0, 0, ".", Kind.BATCH)][0].tensor()
    assert torch.equal(half, full[2:])


def test_a_batch_outside_of_a_step_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    running = session(tmp_path, model)
    batch = torch.ones(3, 2)
    with pytest.raises(CaptureError, match=r"session.batch was called outside of a step.*with session.step\(\)"):
        running.batch(batch)
    with running.step():
        model(running.batch(batch)).sum().backward()
    with running.step():
        assert running.batch(batch) is batch, "nothing is generated after the last traced step"
    assert running.batch(batch) is batch, "the session is closed"
