"""Traces that are not of one run are not compared, and the sentence says which says what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.traces import TraceBuilder, draw_tensor
from ttrace.errors import TraceError
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement


def judge(folder: Path, **changes: dict[str, Any]) -> Judgement:
    """A check of three small traces, each with what is changed of its manifest."""
    traces = {}
    for role in ("reference", "twin", "candidate"):
        said: dict[str, Any] = {"role": role, "versions": {"ttrace": "1", "torch": "2"}, **changes.get(role, {})}
        mesh = said.pop("mesh", "tp=2" if role == "candidate" else "")
        builder = TraceBuilder(folder / role, mesh, **said)
        builder.record_parts(
            "0/0/fc/output", draw_tensor(4, 8) * (1.0 if role == "reference" else 1 + 1e-7), "a b/tp" if mesh else "a b"
        )
        traces[role] = builder.close()
    return check(traces["reference"], [traces["twin"]], traces["candidate"])


def test_traces_of_one_run_are_compared(tmp_path: Path) -> None:
    assert judge(tmp_path).exit is Exit.PASSED


def test_other_packages_of_the_candidate_are_its_own_affair(tmp_path: Path) -> None:
    assert judge(tmp_path, candidate={"versions": {"ttrace": "1", "torch": "3"}}).exit is Exit.PASSED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"twin": {"seed": 1}}, "twin has seed 1, but .*reference has seed 0"),
        ({"candidate": {"seed": 1}}, "candidate has seed 1, but .*reference has seed 0"),
        ({"reference": {"seed": 1}}, "twin has seed 0, but .*reference has seed 1"),
        ({"twin": {"mesh": "dp=2"}}, "twin has mesh 'dp=2', but .*reference has mesh ''"),
        ({"candidate": {"isolated": True}}, "candidate has isolated True, but .*reference has isolated False"),
        ({"twin": {"versions": {"torch": "3"}}}, "twin ran torch 3, but .*reference torch 2"),
        ({"candidate": {"versions": {"ttrace": "2"}}}, "candidate was traced by TTrace 2, but .*reference by 1"),
    ],
    ids=str,
)
def test_traces_of_two_runs_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        judge(tmp_path, **changes)
