"""What each microbatch adds to a gradient is recorded by itself, under every parallelism that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from zoo.harness.candidate import Candidate, Cell
from zoo.harness.cells import trace_cell
from zoo.harness.gpt import Gpt
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import SimulatedRank, judge, train
from zoo.harness.transformer import Shape

SHAPE = Shape(vocab=48, hidden=16, ffn=24, length=8)
FAULTY = "layers.1.feed_forward.w2"


def read_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Read every gradient in a trace, by id."""
    shards = Trace(folder).shards
    return {str(t): own[0].tensor() for t, own in shards.items() if t.kind is Kind.PARAM_GRAD}


def start_session(folder: Path, model: nn.Module, **settings: Any) -> TracingSession:
    plan = Plan(out=folder / "reference", stop=False, **settings)
    return TracingSession(SessionParts(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedRank()))


def test_the_final_gradient_is_the_sum_of_what_microbatches_add(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    tracing = start_session(tmp_path, model, microbatch_grads=True)
    own = []
    with tracing.step():
        for i in range(4):
            x = torch.full((2, 4), float(i + 1))
            model(x).square().sum().backward()
            assert model.weight.grad is not None
            own.append(model.weight.grad.clone())
        tracing._optimizer.step()  # type: ignore[union-attr]
    gradients = read_gradients(tmp_path / "reference")
    assert torch.equal(gradients["0/-/weight/param_grad"], own[-1])
    assert torch.equal(gradients["0/0/weight/param_grad"], own[0])
    for i in (1, 2, 3):
        torch.testing.assert_close(gradients[f"0/{i}/weight/param_grad"], own[i] - own[i - 1], rtol=1e-4, atol=1e-3)
    assert Trace(tmp_path / "reference").notes == ()
    assert not model.weight._backward_hooks


def test_without_the_setting_only_the_final_gradient_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    tracing = start_session(tmp_path, model)
    with tracing.step():
        model(torch.ones(2, 4)).sum().backward()
        tracing._optimizer.step()  # type: ignore[union-attr]
    assert set(read_gradients(tmp_path / "reference")) == {"0/-/weight/param_grad", "0/-/bias/param_grad"}


def test_several_backward_passes_of_one_microbatch_are_one_contribution(tmp_path: Path) -> None:
    """Reentrant recomputation runs a backward pass of its own for every segment."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for _ in range(3):
                x = checkpoint(self.fc, x, use_reentrant=True)
            return x

    model = Shared()
    tracing = start_session(tmp_path, model, microbatch_grads=True)
    with tracing.step():
        model(torch.randn(2, 4)).square().sum().backward()
        tracing._optimizer.step()  # type: ignore[union-attr]
    gradients = read_gradients(tmp_path / "reference")
    torch.testing.assert_close(gradients["0/0/fc.weight/param_grad"], gradients["0/-/fc.weight/param_grad"])


def test_recording_contributions_changes_no_bit(tmp_path: Path) -> None:
    ends = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = Gpt(num_layers=2)
        plan = Plan(out=tmp_path / str(wanted), stop=False, parameters="own", microbatch_grads=wanted)
        train(plan, model, SimulatedRank(), {})
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class StaleWeight(torch.autograd.Function):
    """A linear layer whose weight gradient is made from another input than its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, kept)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        weight, kept = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).T @ kept.flatten(0, 1), None


def keep_an_old_input(candidate: Candidate) -> None:
    """Compute the weight's gradient of each rank's third microbatch from the input of the second."""
    module = candidate.chunks[0].get_submodule(f"module.{FAULTY}")
    inputs: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        inputs.append(x.detach())
        kept = inputs[-2] if len(inputs) == 3 else inputs[-1]
        out: torch.Tensor = StaleWeight.apply(x, module.weight, kept)  # type: ignore[no-untyped-call]
        return out

    module.forward = forward


def run_layouts(folder: Path) -> dict[str, Judgement | None]:
    """Trace clean cells of several layouts, and one with a fault in a single microbatch; call this on two ranks."""
    references: dict[Any, Path] = {}
    layouts = ("ddp", "fsdp", "tp", "tp+sp", "cp-gather", "pp-interleaved-zb")
    cells = [Cell(layout, num_microbatches=4, microbatch_grads=True) for layout in layouts]
    traced = {cell.layout: trace_cell(cell, folder, SHAPE, references) for cell in cells}
    traced["stale"] = trace_cell(cells[0], folder, SHAPE, references, keep_an_old_input)
    dist.barrier()
    return {name: judge(one.reference, one.candidate) if dist.get_rank() == 0 else None for name, one in traced.items()}


@pytest.fixture(scope="module")
def judgements(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judgement]:
    results: dict[str, Judgement] = on_ranks(2, run_layouts, tmp_path_factory.mktemp("contributions"))[0]
    return results


def contributions(judgement: Judgement) -> list[Any]:
    return [c for c in judgement.comparisons if c.id.kind is Kind.PARAM_GRAD and c.id.microbatch is not None]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "tp+sp", "cp-gather", "pp-interleaved-zb"])
def test_clean_layouts_pass_and_what_cannot_be_judged_is_counted(judgements: dict[str, Judgement], layout: str) -> None:
    judgement = judgements[layout]
    trouble = [(str(c.id), c.verdict, c.reason) for c in judgement.comparisons if c.spoils or c.verdict.is_wrong]
    assert judgement.exit is Exit.PASSED, (judgement.problems, trouble[:5])
    reasons = {c.reason for c in contributions(judgement)}
    assert contributions(judgement)
    expected = {"fsdp": {Reason.NO_MICROBATCH_GRADIENTS}, "cp-gather": {Reason.REDUCED_LATER}}.get(layout, {None})
    assert reasons == expected
    for reason in filter(None, expected):
        assert any(note.endswith(describe(Why(reason))) for note in judgement.notes)


@pytest.mark.slow
def test_a_layout_without_single_microbatches_says_so(judgements: dict[str, Judgement]) -> None:
    assert any("have no gradients of single microbatches" in note for note in judgements["fsdp"].notes)


@pytest.mark.slow
def test_a_wrong_gradient_is_found_at_its_microbatch(judgements: dict[str, Judgement]) -> None:
    judgement = judgements["stale"]
    assert judgement.exit is Exit.FOUND
    first = judgement.findings[0].comparison.id
    # The third of each of two ranks.
    assert first == TensorId.of(0, 4, f"{FAULTY}.weight", Kind.PARAM_GRAD)
    wrong = {c.id.microbatch for c in contributions(judgement) if c.verdict.is_wrong}
    assert wrong == {4, 5}
