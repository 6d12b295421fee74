"""Typical mistakes are found, nearly all of them in the exact module and for the right reason."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import Exit
from zoo.bug import Bug, Run, Tier, bugs
from zoo.harness.candidate import Candidate
from zoo.harness.cells import Traced
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import judge
from zoo.harness.small import Small
from zoo.launch import seen as launch
from zoo.mistakes import MISTAKES
from zoo.seen import Seen

PAIRS = (
    ("row-without-its-sum", "sums-twice"),
    ("keys-for-values", "gradient-detached"),
    ("bias-on-every-rank", "read-transposed"),
    ("column-without-its-backward-sum", "float16-norm"),
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All mistakes, in one launch for each number of ranks."""
    start = time.monotonic()
    # Sorted by name, because that mixes the layouts: one rank judges all runs of a batch that share a reference.
    found = launch([Run(name, is_clean=False) for name in sorted(MISTAKES)], tmp_path_factory.mktemp("mistakes"))
    print(f"\n{len(found)} mistakes in {time.monotonic() - start:.0f} s")
    for run, one in found.items():
        is_exact = run.bug.expected.is_met_by(one)
        mark = "exact" if is_exact else "found" if one.exit is Exit.FOUND else "MISSED"
        print(f"{mark:6}  {run.name:32} {one.module}/{one.kind}: {one.sentence or one.trouble}")
    return {run.name: one for run, one in found.items()}


def test_mistakes_are_of_their_own_tier_and_not_among_the_reported_bugs() -> None:
    assert {bug.tier for bug in MISTAKES.values()} == {Tier.T4}
    assert all(bug.tier is not Tier.T4 for bug in bugs().values())
    assert not MISTAKES.keys() & bugs().keys()


@pytest.mark.slow
def test_every_mistake_is_found(seen: dict[str, Seen]) -> None:
    assert len(seen) == len(MISTAKES) >= 30
    assert [name for name, one in seen.items() if one.exit is not Exit.FOUND] == []


@pytest.mark.slow
def test_nearly_every_mistake_is_found_in_its_module_for_its_reason(seen: dict[str, Seen]) -> None:
    inexact = {name: seen[name] for name, bug in MISTAKES.items() if not bug.expected.is_met_by(seen[name])}
    assert len(inexact) * 15 <= len(MISTAKES), inexact  # 28 of 30


@pytest.mark.slow
def test_two_mistakes_at_once_are_both_reported(tmp_path: Path) -> None:
    accused = on_ranks(2, run_pairs, tmp_path)[0]
    for pair, findings in zip(PAIRS, accused, strict=True):
        expected = [MISTAKES[name].expected for name in pair]
        assert {(one.module, one.cause) for one in expected} <= findings, pair


def run_pairs(folder: Path) -> list[set[tuple[str, str]]]:
    """On every rank: two mistakes at once; the modules that are accused, each with its cause."""
    references: dict[Any, Path] = {}
    traced = [trace_together([MISTAKES[name] for name in pair], folder / "-".join(pair), references) for pair in PAIRS]
    dist.barrier()
    if dist.get_rank() != 0:
        return []
    both = [combine(*(judge(one.reference, one.candidate) for one in sides)) for sides in traced]
    return [{(finding.module, finding.cause.name.value) for finding in judgement.findings} for judgement in both]


def trace_together(mistakes: list[Bug], out: Path, references: dict[Any, Path]) -> tuple[Traced, Traced]:
    """On every rank: trace a candidate with all of these mistakes, and trace it again in isolation."""

    def patch(candidate: Candidate) -> None:
        for one in mistakes:
            assert one.patch is not None
            one.patch(candidate)

    case = mistakes[0].case
    assert isinstance(case, Small)
    ordinary = case.trace(out, references, patch)
    dist.barrier()  # the isolated run reads what all ranks traced
    isolated = case.isolate(out.with_name(f"{out.name}-isolated"), ordinary, mistakes[0].expected.module, patch)
    return ordinary, isolated
