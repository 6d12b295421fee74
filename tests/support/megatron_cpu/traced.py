"""This module traces cases: references in one process each, candidates on many ranks, all of a kind in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.support.megatron_cpu.case import Case
from tests.support.megatron_cpu.runtime import on_megatron
from tests.support.megatron_cpu.wheels import NEWEST
from ttrace.capture.plan import Plan
from ttrace.judge.verdict import Judgement
from zoo.harness.cells import Traced, judge_all
from zoo.harness.results import Outcome
from zoo.harness.runs import NUM_TWINS

if TYPE_CHECKING:
    from tests.support.megatron_cpu.models import Training

Fault = Callable[["Training"], AbstractContextManager[object]]
"""Something that is wrong around a candidate's steps."""
NUM_LAUNCHES = 2
"""References that run at the same time, as there are so many cores."""


def outcomes(
    num_ranks: int,
    cases: Sequence[Case],
    folder: Path,
    *,
    version: str = NEWEST,
    faults: Sequence[Fault | None] = (),
    keep: Callable[[Judgement], Any] = Outcome.of,
    timeout: float = 400.0,
) -> list[Any]:
    """What is kept of each case's judgement, in order; `faults` may spoil one case each."""
    references = {case: folder / f"reference-{i}" for i, case in enumerate(dict.fromkeys(c.reference for c in cases))}
    with ThreadPoolExecutor(NUM_LAUNCHES) as pool:
        shares = [dict(list(references.items())[i::NUM_LAUNCHES]) for i in range(NUM_LAUNCHES)]
        launches = [pool.submit(on_megatron, 1, trace_references, s, version=version, timeout=timeout) for s in shares]
        for launch in launches:
            launch.result()
    todo = [(case, Traced(references[case.reference], folder / f"{i}-{case.name}")) for i, case in enumerate(cases)]
    results = on_megatron(num_ranks, trace_candidates, todo, list(faults), keep, version=version, timeout=timeout)
    kept: list[Any] = results[0]
    return kept


def trace_references(cases: dict[Case, Path]) -> None:
    """On one rank: every reference and its twins."""
    for case, folder in cases.items():
        trace(case, Plan(out=folder / "reference", stop=False))
        for twin in range(1, NUM_TWINS + 1):
            known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
            trace(case, Plan(out=folder / f"twin-{twin}", stop=False).model_copy(update=known))


def trace_candidates(
    cases: Sequence[tuple[Case, Traced]], faults: Sequence[Fault | None], keep: Callable[[Judgement], Any]
) -> list[Any]:
    """On every rank: all candidates, and then their judgements."""
    for i, (case, traced) in enumerate(cases):
        plan = Plan(out=traced.candidate, role="candidate", reference=traced.reference / "reference", stop=False)
        trace(case, plan, faults[i] if i < len(faults) else None)
    dist.barrier()
    return judge_all([traced for _, traced in cases], keep)


def trace(case: Case, plan: Plan, fault: Fault | None = None) -> None:
    # These import megatron, which only the ranks have.
    from tests.support.megatron_cpu.layers import MIXER_RULES
    from tests.support.megatron_cpu.models import Training, parallel
    from tests.support.megatron_cpu.versions import NoOptimizer
    from ttrace.adapters.megatron import Megatron
    from ttrace.capture.session import Session
    from ttrace.layouts.rules import Rules

    with parallel(case):
        training = Training(case)
        adapter = Megatron(training.chunks, training.optimizer)
        stepped = None if isinstance(training.optimizer, NoOptimizer) else training.optimizer
        session = Session(plan, training.chunks, stepped, adapter, Rules.of(MIXER_RULES if case.custom else {}))
        with fault(training) if fault else nullcontext():
            for step in range(plan.num_steps):
                with session.step():
                    training.step(step)
        session.close()
