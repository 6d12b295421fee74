"""An iteration without a backward pass: calls of a module are one sequence, however it is filled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement, Reach, Untested
from ttrace.trace.reader import Trace
from zoo.harness.plans import planned
from zoo.harness.runs import SimulatedRank

LENGTH, WIDTH, NUM_TWINS = 6, 8, 2


class Sum(nn.Module):
    """A sum over all tokens so far, whose cache is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = self.linear(x).cumsum(1)
        sums = sums + self.cache[-1] if self.cache else sums
        self.cache.append(sums[:, -1:])
        return sums


class LogProbs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(-1)[..., 0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.sum, self.logprobs = nn.Embedding(16, WIDTH), Sum(), LogProbs()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = self.sum(self.embed(ids))
        self.logprobs(sums[:, -1:] if 1 < ids.shape[1] < LENGTH else sums)
        return sums


def trace(out: Path, parts: Sequence[int], *, forgets: bool = False, **known: Any) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    plan = planned(out=out, forward_only=True).model_copy(update=known)
    session = TracingSession(SessionParts(plan, model, None, SimulatedRank()))
    with session.step(), torch.no_grad():
        ids = session.batch({"ids": torch.randint(16, (2, LENGTH))})["ids"]
        for part in ids.split(list(parts), 1):
            if forgets:
                model.sum.cache.clear()
            model(part)
    session.close()


def judge(folder: Path, parts: Sequence[int], *, forgets: bool = False) -> Judgement:
    trace(folder / "reference", [LENGTH])
    known: dict[str, Any] = {"reference": folder / "reference"}
    for twin in range(1, NUM_TWINS + 1):
        trace(folder / f"twin-{twin}", [LENGTH], **known, role="twin", twin=twin)
    trace(folder / "candidate", parts, forgets=forgets, **known, role="candidate")
    twins = [Trace(folder / f"twin-{twin}") for twin in range(1, NUM_TWINS + 1)]
    return check(Trace(folder / "reference"), twins, Trace(folder / "candidate"))


@pytest.mark.parametrize("parts", [[6], [1, 1, 1, 1, 1, 1]])
def test_however_a_sequence_is_filled_it_is_the_same(parts: list[int], tmp_path: Path) -> None:
    judgement = judge(tmp_path, parts)
    assert judgement.exit is Exit.PASSED, (judgement.problems, judgement.findings)
    sites = {str(comparison.id.site) for comparison in judgement.comparisons}
    assert {"sum/output", "sum.linear/input", "./output", "logprobs/output"} <= sites
    [note] = [note for note in judgement.notes if note.startswith("logprobs: ")]
    assert "on average 1 x the reference's" in note
    assert not [note for note in judgement.notes if "one rank" in note]
    assert judgement.reach == Reach(None, {}, (Untested.OWN_DATA,))


def test_a_forgotten_cache_is_found_in_its_module(tmp_path: Path) -> None:
    judgement = judge(tmp_path, [1, 1, 1, 1, 1, 1], forgets=True)
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].module == "sum"


def test_only_the_logits_of_the_last_chunk_count(tmp_path: Path) -> None:
    """A prompt in two chunks has two rows of log-probabilities, and one call has six."""
    judgement = judge(tmp_path, [3, 3])
    wrong = [comparison for comparison in judgement.comparisons if comparison.spoils or comparison.verdict.is_wrong]
    assert {comparison.id.name for comparison in wrong} == {"logprobs"}
