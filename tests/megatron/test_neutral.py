"""Recording changes no bit of what Megatron trains."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.support.megatron_cases import BF16, gpt, llama, moe
from ttrace.capture.plan import Plan
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.runtime import on_megatron

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

NUM_STEPS = 2
CASES = [
    gpt(tp=2, sp=True, recompute="full"),
    gpt(pp=2, deallocate=True),
    gpt(pp=2, vpp=2),
    gpt(zero=True, overlap_grads=True, overlap_params=True, dtype=BF16),
    llama(cp=2),
    moe(ep=2),
]


def trained(case: Case, plan: Plan | None) -> list[torch.Tensor]:
    """All parameters of this rank after the steps, and the loss and norm of each step."""
    from ttrace.adapters.megatron.adapter import Megatron
    from ttrace.capture.parts import SessionParts
    from ttrace.capture.session import TracingSession
    from zoo.harness.megatron.models import Training, parallel

    torch.manual_seed(0)
    with parallel(case):
        training = Training(case)
        adapter = Megatron(training.chunks, training.optimizer)
        session = TracingSession(SessionParts(plan, training.chunks, training.optimizer, adapter)) if plan else None
        told = []
        for number in range(NUM_STEPS):
            with session.step() if session else nullcontext():
                step = training.step(number)
                told.append(torch.tensor([step.loss, step.grad_norm or 0.0]))
        if session:
            session.close()
        return [*told, *(p.detach().clone() for chunk in training.chunks for p in chunk.parameters())]


def differing(cases: list[Case], folder: Path) -> list[int]:
    """On every rank, for each case: how many tensors differ with recording on."""
    found = []
    for number, case in enumerate(cases):
        plan = Plan(out=folder / str(number), parameters="own", num_steps=NUM_STEPS, stop=False)
        without, with_it = trained(case, None), trained(case, plan)
        found.append(sum(not torch.equal(a, b) for a, b in zip(without, with_it, strict=True)))
    return found


def test_recording_is_bitwise_neutral(tmp_path: Path) -> None:
    for rank in on_megatron(2, differing, CASES, tmp_path):
        assert dict(zip([case.name for case in CASES], rank, strict=True)) == {case.name: 0 for case in CASES}
    assert all(list((tmp_path / str(number)).glob("rank-*/end.json")) for number in range(len(CASES)))
