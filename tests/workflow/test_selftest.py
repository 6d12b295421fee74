"""On the example models' traces, every fault that a selftest claims to see is found by a whole check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import run_example, ttrace
from ttrace.judge.check import judge_candidate
from ttrace.judge.selftest import INJECTIONS, inject_faults
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import TensorId
from ttrace.trace.reader import Trace
from ttrace.workflow.run import Run

NUM_SAMPLES = 40
"""A whole check for each fault in each tensor would take minutes."""


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize("example", ["hidden_allreduce", pytest.param("dtensor_tp", marks=pytest.mark.nightly)])
def test_what_is_claimed_to_be_seen_is_found(tmp_path: Path, example: str) -> None:
    done = run_example(example, tmp_path / "clean")
    assert done.returncode == 0, done.stdout + done.stderr
    tested = ttrace("selftest", str(tmp_path / "clean"), "--json")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    report = json.loads(tested.stdout)
    assert report["without_power"] == {}
    assert all(tensor["error"] is not None and tensor["error"] < 1e-2 for tensor in report["tensors"])

    claims = [(tensor["id"], name) for tensor in report["tensors"] for name, seen in tensor["seen"].items() if seen]
    assert {name for _, name in claims} >= set(INJECTIONS) - {"another microbatch"}
    run = Run(tmp_path / "clean")
    rounding = ToleranceModel.measure(Trace(run.reference), [Trace(path) for path in run.twins()])
    for tensor_id, name in claims[:: max(len(claims) // NUM_SAMPLES, 1)]:
        candidate = Trace(run.candidate)
        wrong = dict(inject_faults(TensorId.parse(tensor_id), candidate))[name]
        altered = candidate.with_shards({**candidate.shards, TensorId.parse(tensor_id): wrong})
        judgement = judge_candidate(rounding, altered)
        accused = [str(c.id) for c in judgement.comparisons if c.verdict.is_wrong]
        assert accused == [tensor_id], (name, accused)
        assert judgement.exit is not Exit.PASSED, (tensor_id, name)
