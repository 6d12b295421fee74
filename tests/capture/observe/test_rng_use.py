"""Modules that draw random numbers are named, on either side, and looking for them draws none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ttrace.capture.observe.rng_use import RngUse
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.names import Names
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import Kind
from zoo.harness.gpt import LENGTH, VOCAB, Attention, Block, Gpt
from zoo.harness.runs import SimulatedRank, judge, trace_reference, train

Build = Callable[[], nn.Module]


class Forgetful(Attention):
    """Attention with dropout inside the fused operator, as nobody's module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (p.reshape(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(b, t, -1))
        return out


class Dropping(Block):
    """A block that drops by a function, outside the modules in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.2, training=self.training)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


def with_attention_dropout() -> Gpt:
    model = Gpt(num_layers=2)
    model.layers[1].attention = Forgetful(1)
    return model


def with_functional_dropout() -> Gpt:
    model = Gpt(num_layers=2)
    model.layers[1] = Dropping(1)
    return model


def quiet() -> Gpt:
    return Gpt(num_layers=2)


def trace_and_judge(folder: Path, reference: Build, candidate: Build) -> Judgement:
    torch.manual_seed(0)
    trace_reference(folder, reference, {})
    plan = Plan(out=folder / "candidate", role="candidate", reference=folder / "reference", stop=False)
    train(plan, candidate(), SimulatedRank(), {})
    return judge(folder, folder / "candidate")


@pytest.mark.parametrize(
    ("build", "module"),
    [(with_functional_dropout, "layers.1"), (with_attention_dropout, "layers.1.attention")],
    ids=["functional", "attention"],
)
def test_random_numbers_in_the_candidate_are_not_judged_and_their_module_is_named(
    tmp_path: Path, build: Build, module: str
) -> None:
    judgement = trace_and_judge(tmp_path, quiet, build)
    assert judgement.exit is Exit.UNJUDGED
    assert judgement.findings == ()
    assert [p for p in judgement.problems if p.startswith(f"the candidate drew random numbers in {module}: ")]


def test_random_numbers_in_the_reference_are_named_too(tmp_path: Path) -> None:
    judgement = trace_and_judge(tmp_path, with_attention_dropout, quiet)
    assert judgement.exit is Exit.UNJUDGED
    assert [p for p in judgement.problems if p.startswith("the reference drew random numbers in layers.1.attention: ")]


def test_both_sides_are_told_in_one_sentence(tmp_path: Path) -> None:
    judgement = trace_and_judge(tmp_path, with_functional_dropout, with_functional_dropout)
    assert judgement.exit is Exit.UNJUDGED
    named = [p for p in judgement.problems if "drew random numbers" in p]
    assert len(named) == 1
    assert named[0].startswith("reference and candidate drew random numbers in layers.1: ")


class Reseeded(Dropping):
    """A block that always draws the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return super().forward(x)


def enlarge(_module: nn.Module, gradients: Any, _grad_output: Any) -> tuple[torch.Tensor]:
    return (1.1 * gradients[0],)


def with_the_same_dropout(*, is_wrong: bool = False) -> Gpt:
    model = Gpt(num_layers=2)
    model.layers[1] = Reseeded(1)
    if is_wrong:
        model.get_submodule("layers.1.mlp").register_full_backward_hook(enlarge)
    return model


def test_a_module_that_draws_the_same_on_both_sides_is_judged(tmp_path: Path) -> None:
    right = trace_and_judge(tmp_path / "right", with_the_same_dropout, with_the_same_dropout)
    assert right.exit is Exit.PASSED
    wrong = trace_and_judge(tmp_path / "wrong", with_the_same_dropout, lambda: with_the_same_dropout(is_wrong=True))
    assert wrong.exit is Exit.FOUND
    assert wrong.findings[0].comparison.id.kind is Kind.GRAD_INPUT


def test_a_model_that_draws_nothing_is_quiet(tmp_path: Path) -> None:
    judgement = trace_and_judge(tmp_path, quiet, quiet)
    assert judgement.exit is Exit.PASSED, judgement.problems
    assert not any("random" in text for text in (*judgement.problems, *judgement.notes))


def test_what_is_wrong_before_the_draw_is_still_found(tmp_path: Path) -> None:
    def broken() -> Gpt:
        model = with_functional_dropout()
        norm = model.get_submodule("layers.0.norm1")
        forward = norm.forward
        norm.forward = lambda x: 1.1 * forward(x)
        return model

    judgement = trace_and_judge(tmp_path, quiet, broken)
    assert judgement.exit is Exit.FOUND
    assert [finding.module for finding in judgement.findings] == ["layers.0.norm1"]


def drawing(model: nn.Module, *, backward: bool = True) -> list[str]:
    draws = RngUse(Names([model]).modules(), lambda: True)
    loss = model(torch.randint(VOCAB, (2, LENGTH))).sum()
    if backward:
        loss.backward()
    draws.remove()
    return list(draws.modules)


class Recomputing(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 32)
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, self.words(ids), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_restores_the_state_and_is_no_draw(reentrant: bool) -> None:
    assert drawing(Recomputing(Block(1), reentrant)) == []
    assert drawing(Recomputing(Dropping(1), reentrant)) == ["inner"]


def test_a_fork_around_an_inner_module_is_no_draw() -> None:
    """Tensor-parallel frameworks switch to another stream for attention, dropout or not."""

    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.drop = nn.Embedding(VOCAB, 4), nn.Dropout(0.0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            with torch.random.fork_rng():
                torch.manual_seed(1234)
                dropped: torch.Tensor = self.drop(x)
            return dropped

    assert drawing(Forking()) == []


def test_every_module_that_draws_in_its_own_code_is_named() -> None:
    model = with_functional_dropout()
    model.layers[1].attention = Forgetful(1)
    assert drawing(model) == ["layers.1.attention", "layers.1"]


def test_a_module_that_fails_half_way_breaks_nothing() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            F.dropout(x)
            raise ValueError

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(VOCAB, 4), Failing()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.words(ids)
            try:
                self.inner(x)
            except ValueError:
                return x
            raise AssertionError

    assert drawing(Catching()) == ["inner"]


def test_looking_draws_nothing() -> None:
    """Bitwise: losses, gradients and the stream itself are those of a run without a session."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = with_functional_dropout()
        draws = RngUse(Names([model]).modules(), lambda: True) if watched else None
        loss = model(torch.randint(VOCAB, (2, LENGTH))).square().mean()
        loss.backward()
        ends.append([loss.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters())])
        assert draws is None or list(draws.modules) == ["layers.1"]
    for a, b in zip(*ends, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_an_evaluation_may_draw() -> None:
    with torch.no_grad():
        assert drawing(with_functional_dropout(), backward=False) == []
