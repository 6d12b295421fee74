"""Judgement of traces in a store, side by side under one URL, read by range requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from ttrace.judge.check import judge_candidate
from ttrace.judge.engine import Engine, OnProgress
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Judgement
from ttrace.trace.format import MANIFEST, rank_folder
from ttrace.trace.store import Place, Remote
from ttrace.workflow.run import Strictness, check_side, choose_twins, open_trace


def judge(folder: Remote, strictness: Strictness, *, progress: OnProgress | None = None, engine: Engine) -> Judgement:
    """Judge `candidate` against `reference`, `twin-1`, `twin-2` ..., found by name: new objects may not be listed."""
    places: Iterator[Place] = (folder / f"twin-{number}" for number in count(1))
    twins, notes = choose_twins(takewhile(_is_trace, places), folder)
    reference, candidate = open_trace(folder / "reference"), open_trace(folder / "candidate")
    check_side(reference, "reference")
    check_side(candidate, "candidate")
    rounding = ToleranceModel.measure(reference, twins, strictness.margin, engine=engine, progress=progress)
    found = judge_candidate(rounding, candidate, policy=strictness.policy, progress=progress, engine=engine)
    return replace(found, notes=(*notes, *found.notes))


def _is_trace(folder: Place) -> bool:
    return (folder / rank_folder(0) / MANIFEST).exists()
