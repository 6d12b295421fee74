"""Faults as they happen: every one is found, nearly all in the exact module and for the right reason."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.catalogue import CATALOGUE, Fault, trace_fault, trace_together
from ttrace.judge.findings.isolated import combine
from ttrace.judge.verdict import CauseName, Exit
from zoo.harness.cells import judge_all
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import judge
from zoo.seen import Seen


def is_exact(seen: Seen, fault: Fault) -> bool:
    return (seen.module, seen.kind, seen.cause, seen.axis) == (fault.module, fault.kind, fault.cause.value, fault.axis)


def run_faults(folder: Path, names: list[str]) -> list[Seen]:
    references: dict[Any, Path] = {}
    faults = [fault for fault in CATALOGUE if fault.name in names]
    traced = [trace_fault(fault, folder, references) for fault in faults]
    dist.barrier()
    return judge_all(traced, Seen.of)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """The whole catalogue, in one launch for each number of ranks."""
    found: dict[str, Seen] = {}
    start = time.monotonic()
    for num_ranks in (2, 4):
        names = [fault.name for fault in CATALOGUE if fault.num_ranks == num_ranks]
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        found |= dict(zip(names, on_ranks(num_ranks, run_faults, folder, names)[0], strict=True))
    print(f"\n{len(found)} faults in {time.monotonic() - start:.0f} s")
    for fault in CATALOGUE:
        one = found[fault.name]
        mark = "exact" if is_exact(one, fault) else "found" if one.exit is Exit.FOUND else "MISSED"
        print(f"{mark:6}  {fault.name:32} {fault.layout:10} {one.module}/{one.kind}: {one.sentence or one.trouble}")
    return found


PAIRS = (
    ("row without its sum", "sums twice"),
    ("keys for values", "gradient detached"),
    ("bias on every rank", "read transposed"),
    ("column without its backward sum", "float16 norm"),
)


def run_pairs(folder: Path) -> list[set[tuple[str, CauseName]]]:
    """On every rank: two faults at once; the modules that are accused, with what is said of each."""
    references: dict[Any, Path] = {}
    faults = {fault.name: fault for fault in CATALOGUE}
    traced = [trace_together([faults[name] for name in pair], folder, references) for pair in PAIRS]
    dist.barrier()
    if dist.get_rank() != 0:
        return []
    both = [combine(*(judge(one.reference, one.candidate) for one in pair)) for pair in traced]
    return [{(finding.module, finding.cause.name) for finding in judgement.findings} for judgement in both]


@pytest.mark.slow
def test_two_faults_at_once_are_both_reported(tmp_path: Path) -> None:
    faults = {fault.name: fault for fault in CATALOGUE}
    found = on_ranks(2, run_pairs, tmp_path)[0]
    for pair, accused in zip(PAIRS, found, strict=True):
        assert {(faults[name].module, faults[name].cause) for name in pair} <= accused, pair


@pytest.mark.slow
def test_every_fault_is_found(seen: dict[str, Seen]) -> None:
    assert len(seen) == len(CATALOGUE) >= 30
    assert [name for name, one in seen.items() if one.exit is not Exit.FOUND] == []


@pytest.mark.slow
def test_nearly_every_fault_is_found_in_its_module_for_its_reason(seen: dict[str, Seen]) -> None:
    inexact = {fault.name: seen[fault.name] for fault in CATALOGUE if not is_exact(seen[fault.name], fault)}
    assert len(inexact) * 15 <= len(CATALOGUE), inexact  # 28 of 30
