"""Errors along the layers: what breaks the pattern of rounding is noted, and fails nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bench._models import VOCAB, train
from tests.support.traces import Case, draw_tensor, nudge
from ttrace.capture.plan import Plan
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement
from ttrace.trace.reader import Trace

NUM_LAYERS = 12
Law = Callable[[int], float]
"""By the number of layers passed, from 1."""


def along(folder: Path, twins: Law, ratio: Law, kind: str = "output") -> Judgement:
    """Twins that err by a law, and a candidate whose error is another times theirs."""
    case = Case(folder)
    case.add_right("0/0/first/output")
    for layer in range(NUM_LAYERS):
        passed = layer + 1 if kind == "output" else NUM_LAYERS - layer
        full, noise = draw_tensor(64, 64, seed=layer), twins(passed)
        change = partial(nudge, size=noise * ratio(passed), seed=300 + layer)
        case.add(f"0/0/model.layers.{layer}/{kind}", full, "a b/tp", change, noise=noise)
    return case.judge()


def odd(judgement: Judgement) -> list[str]:
    return [note for note in judgement.notes if "depth" in note]


@pytest.mark.parametrize("kind", ["output", "grad_output"])
def test_the_square_root_is_as_it_should_be(tmp_path: Path, kind: str) -> None:
    judgement = along(tmp_path, lambda n: 1e-5 * math.sqrt(n), lambda _: 0.8, kind)
    assert judgement.exit is Exit.PASSED
    assert odd(judgement) == []


def test_a_reference_that_doubles_its_error_in_every_layer_is_noted(tmp_path: Path) -> None:
    judgement = along(tmp_path, lambda n: 1e-6 * 2**n, lambda _: 0.8)
    assert judgement.exit is Exit.PASSED
    (note,) = odd(judgement)
    assert "the reference's own error grows far beyond the square root of depth: outputs from 2.0e-06 at " in note
    assert "model.layers.0 to" in note
    assert "at model.layers.11" in note


def test_backward_is_passed_from_the_last_layer_on(tmp_path: Path) -> None:
    judgement = along(tmp_path, lambda n: 1e-6 * 2**n, lambda _: 0.8, "grad_output")
    (note,) = odd(judgement)
    assert "gradients of outputs" in note
    assert "at model.layers.0, " in note


def test_a_candidate_that_falls_behind_more_and_more_is_noted(tmp_path: Path) -> None:
    judgement = along(tmp_path, lambda n: 1e-5 * math.sqrt(n), lambda n: 0.4 + 0.2 * n)
    assert judgement.exit is Exit.PASSED
    (note,) = odd(judgement)
    assert "outputs err 0.9 x the estimate at model.layers.0 to 3, 2.5 x at model.layers.8 to 11" in note


def test_a_ratio_that_is_the_same_everywhere_is_the_tolerances_affair(tmp_path: Path) -> None:
    assert odd(along(tmp_path, lambda n: 1e-5 * math.sqrt(n), lambda _: 3.0)) == []


class Chaos(nn.Module):
    """Every layer stretches what differs by about three."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.sin(4.0 * layer(x))
        out: torch.Tensor = self.head(x)
        return out


def test_an_unstable_model_is_noted(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path / "reference", stop=False)
    train(plan, Chaos())
    known = {"reference": plan.out}
    train(plan.model_copy(update={"out": tmp_path / "twin-1", "role": "twin", "twin": 1, **known}), Chaos())
    train(plan.model_copy(update={"out": tmp_path / "candidate", "role": "candidate", **known}), Chaos())
    judgement = check(Trace(plan.out), [Trace(tmp_path / "twin-1")], Trace(tmp_path / "candidate"))
    assert judgement.exit is Exit.PASSED
    assert any(note.startswith("the reference's own error grows far beyond") for note in judgement.notes)
