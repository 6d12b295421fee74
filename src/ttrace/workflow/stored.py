"""This module judges traces that are kept in a store, side by side under one URL, by range requests."""

from __future__ import annotations

from itertools import count, takewhile

from ttrace.errors import TTraceError
from ttrace.judge.check import checked
from ttrace.judge.engine import Engine, Progress
from ttrace.judge.twins import Twins
from ttrace.judge.verdict import Judgement
from ttrace.trace.format import MANIFEST, rank_folder
from ttrace.trace.reader import Trace
from ttrace.trace.store import Remote
from ttrace.workflow.run import Strictness
from ttrace.workflow.stages import check_launch


def judged(folder: Remote, strictness: Strictness, *, progress: Progress | None = None, engine: Engine) -> Judgement:
    """Check `candidate` against `reference` and `twin-1`, `twin-2` ...; they are asked for by name, not listed."""
    named = (folder / f"twin-{number}" for number in count(1))
    twins = [Trace(twin) for twin in takewhile(_is_trace, named)]
    if not twins:
        raise TTraceError(f"{folder} holds no twin-1: tolerances come from twins. `ttrace trace --twin 1` makes one.")
    rounding = Twins(Trace(folder / "reference"), twins, strictness.margin, engine, progress)
    candidate = Trace(folder / "candidate")
    for trace in (rounding.reference, *twins, candidate):
        check_launch(trace)
    return checked(rounding, candidate, policy=strictness.policy, progress=progress, engine=engine)


def _is_trace(folder: Remote) -> bool:
    return (folder / rank_folder(0) / MANIFEST).exists()
