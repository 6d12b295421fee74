"""What is recorded in full: as much as a budget allows, and the same on both sides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ttrace.capture.probes.detail import Detail
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from zoo.harness.gpt import RULES, Gpt
from zoo.harness.plans import planned
from zoo.harness.runs import SimulatedRank, train


def trace(folder: Path, **settings: Any) -> Trace:
    torch.manual_seed(0)
    train(planned(out=folder, num_buckets=64, **settings), Gpt(), SimulatedRank(), RULES)
    return Trace(folder)


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("chunk-*")) - 262_144  # the header of its only chunk


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace(tmp_path_factory.mktemp("full") / "reference")


def test_everything_is_in_full_within_the_budget(full: Trace) -> None:
    assert full.count_sketches() == (0, len(full.shards) - sum(t.kind is Kind.UPDATE for t in full.shards))


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_what_exceeds_the_budget_is_sketched_and_every_run_follows(full: Trace, tmp_path: Path, share: float) -> None:
    """Parameters are decided on together, and first: what they will take is known."""
    budget = round(2 * share * count_bytes(Path(str(full.folder))))
    reference = trace(tmp_path / "reference", budget=budget)
    sketched = {shards[0].id for shards in reference.shards.values() if shards[0].record.sketch}
    records = {t: shards[0].record for t, shards in reference.shards.items() if t.kind is not Kind.UPDATE}
    large = [t for t, r in records.items() if r.dtype.is_floating_point and math.prod(r.shape) > 128]
    of_parameters = {t in sketched for t in large if t.kind.is_of_param}
    of_activations = {t in sketched for t in large if not t.kind.is_of_param and t.kind is not Kind.BATCH}
    assert (of_parameters, of_activations) == ({share == 0.05}, {True, False})
    assert count_bytes(tmp_path / "reference") <= budget / 2 + 64 * 8 * len(reference.shards)
    known = {"reference": reference.folder, "budget": budget}
    twins = [trace(tmp_path / f"twin-{number}", role="twin", twin=number, **known) for number in (1, 2)]
    candidate = trace(tmp_path / "candidate", role="candidate", **known)
    assert {s[0].id for s in candidate.shards.values() if s[0].record.sketch} == sketched
    assert check(reference, twins, candidate).exit is Exit.PASSED


def test_what_other_runs_replay_is_never_a_sketch() -> None:
    plan = planned(out=Path("x"), record="sketch", full=("head/*",))
    detail = Detail(plan, ReferenceTrace(None), [], 1)
    ids = [TensorId.parse(text) for text in ("0/0/head/output", "0/0/a/output", "0/0/a/decision.0")]
    assert [detail.is_sketched(tensor_id, torch.ones(9)) for tensor_id in ids] == [False, True, False]
