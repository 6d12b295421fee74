"""Traces of cases: references in one process each, candidates on many ranks, as few launches as possible."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrace.capture.plan import Plan
from zoo.harness.cells import Traced, shared_out
from zoo.harness.limits import HANG
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.data import Change
from zoo.harness.megatron.runtime import on_megatron
from zoo.harness.megatron.wheels import NEWEST
from zoo.harness.plans import planned
from zoo.harness.results import Outcome
from zoo.harness.runs import NUM_TWINS, judge

if TYPE_CHECKING:
    from zoo.harness.megatron.models import Training

Fault = Callable[["Training"], AbstractContextManager[object] | None]
"""Something done to a candidate once it is attached; a context manager is open around its steps."""
References = dict[Case, Path]
"""Where the reference of each case is traced, with its twins."""
NUM_LAUNCHES = 2
"""References that run at the same time, as there are so many cores."""


@dataclass(frozen=True)
class Timed:
    """What is kept of a case, and the seconds of tracing it, with a reference that no earlier case had."""

    kept: Any
    seconds: float


def outcomes(
    num_ranks: int, cases: Sequence[Case], folder: Path, *, version: str = NEWEST, known: References | None = None
) -> list[Outcome]:
    """Return the outcome of each case, in order."""
    return [one.kept for one in judgements(num_ranks, cases, folder, outcome, version=version, known=known)]


def outcome(traced: Traced) -> Outcome:
    return Outcome.of(judge(traced.reference, traced.candidate))


def judgements(
    num_ranks: int,
    cases: Sequence[Case],
    folder: Path,
    judge: Callable[[Traced], Any],
    *,
    version: str = NEWEST,
    faults: Sequence[Fault | None] = (),
    timeout: float = HANG,
    known: References | None = None,
) -> list[Timed]:
    """Return what a judge keeps of each case, in order; `faults` may spoil one case each.

    References that are in `known` are not traced again, and new ones are added to it.
    """
    references = {} if known is None else known
    wanted = dict.fromkeys(case.reference for case in cases)
    new = {case: folder / f"reference-{i}" for i, case in enumerate(wanted) if case not in references}
    references |= new
    shares = [dict(list(new.items())[i::NUM_LAUNCHES]) for i in range(min(NUM_LAUNCHES, len(new)))]
    with ThreadPoolExecutor(NUM_LAUNCHES) as pool:
        launches = [pool.submit(on_megatron, 1, trace_references, s, version=version, timeout=timeout) for s in shares]
        took = {case: seconds for launch in launches for case, seconds in launch.result()[0].items()}
    todo = [(case, Traced(references[case.reference], folder / f"{i}-{case.name}")) for i, case in enumerate(cases)]
    results = on_megatron(num_ranks, trace_candidates, todo, list(faults), judge, version=version, timeout=timeout)
    kept: list[Timed] = results[0]
    return [
        replace(one, seconds=one.seconds + took.pop(case.reference, 0.0)) for one, case in zip(kept, cases, strict=True)
    ]


def trace_references(cases: dict[Case, Path]) -> dict[Case, float]:
    """On one rank: every reference and its twins; the seconds of each."""
    took = {}
    for case, folder in cases.items():
        begin = time.monotonic()
        trace(case, planned(out=folder / "reference"))
        for twin in range(1, NUM_TWINS + 1):
            known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
            trace(case, planned(out=folder / f"twin-{twin}").model_copy(update=known))
        took[case] = time.monotonic() - begin
    return took


def trace_candidates(
    cases: Sequence[tuple[Case, Traced]], faults: Sequence[Fault | None], judge: Callable[[Traced], Any]
) -> list[Timed]:
    """On every rank: all candidates, and then their judgements."""
    took = []
    for (case, traced), fault in itertools.zip_longest(cases, faults):
        begin = time.monotonic()
        plan = planned(out=traced.candidate, role="candidate", reference=traced.reference / "reference")
        trace(case, plan, fault)
        took.append(time.monotonic() - begin)
    kept = shared_out([traced for _, traced in cases], judge)
    return [Timed(one, seconds) for one, seconds in zip(kept, took, strict=True)]


def trace(case: Case, plan: Plan, fault: Fault | None = None, batch: Change = dict) -> None:
    # These import megatron, which only the ranks have.
    from ttrace.adapters.megatron.adapter import Megatron
    from ttrace.capture.parts import Declarations, SessionParts
    from ttrace.capture.session import TracingSession
    from ttrace.layouts.rules import Rules
    from zoo.harness.megatron.layers import MIXER_RULES
    from zoo.harness.megatron.models import Training, parallel
    from zoo.harness.megatron.versions import NoOptimizer

    with parallel(case):
        training = Training(case)
        adapter = Megatron(training.chunks, training.optimizer)
        stepped = None if isinstance(training.optimizer, NoOptimizer) else training.optimizer
        session = TracingSession(
            SessionParts(
                plan,
                training.chunks,
                stepped,
                adapter,
                Declarations(rules=Rules.of(MIXER_RULES if case.custom else {})),
            )
        )
        with (fault(training) if fault else None) or nullcontext():
            for step in range(plan.num_steps):
                with session.step():
                    training.step(step, batch)
        session.close()
