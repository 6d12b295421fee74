"""What is recorded in full: as much as a budget allows, and the same on both sides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.traces import TraceBuilder, draw_tensor
from ttrace.capture.probes.recorder import Detail
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import SketchError
from ttrace.judge.check import check
from ttrace.judge.tensors.logical import LogicalTensor, measure
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from zoo.harness.gpt import RULES, Gpt
from zoo.harness.plans import planned
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import Change, SimulatedRank, gpt_case, judge, trace_reference, train


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


# A sketch in place of a tensor: the same verdicts from far fewer bytes.


SKETCH = {"record": "sketch", "num_buckets": 256}


def double_output(model: nn.Module, rank: int) -> None:
    """Double a layer's output on one of two ranks."""
    if rank == 1:
        model.get_submodule("layers.1.mlp.fc1").register_forward_hook(lambda _module, _args, output: 2 * output)


def scale_gradient(model: nn.Module, rank: int) -> None:  # noqa: ARG001
    """Make one weight's gradient 5% too large."""
    model.get_parameter("layers.2.mlp.fc1.weight").register_hook(lambda gradient: 1.05 * gradient)


CASES: dict[str, tuple[torch.dtype, Change | None]] = {
    "clean": (torch.float32, None),
    "clean bf16": (torch.bfloat16, None),
    "doubled": (torch.float32, double_output),
    "gradient": (torch.float32, scale_gradient),
}


def run_cases(folder: Path) -> list[dict[str, Judgement | None]]:
    found: list[dict[str, Judgement | None]] = []
    for name, (dtype, change) in CASES.items():
        by_way: dict[str, Judgement | None] = {}
        for way, settings in (("full", {}), ("sketch", SKETCH)):
            out = folder / f"{name}-{way}"
            by_way[way] = gpt_case(out, dtype, 0, change, num_steps=2, **settings)
            dist.barrier()
        found.append(by_way)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Judgement]]:
    folder = tmp_path_factory.mktemp("sketches")
    results = on_ranks(2, run_cases, folder)[0]
    return dict(zip(CASES, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sketches_say_what_full_traces_say(found: dict[str, dict[str, Judgement]], name: str) -> None:
    full, sketch = found[name]["full"], found[name]["sketch"]
    assert full.exit is sketch.exit is (Exit.PASSED if name.startswith("clean") else Exit.FOUND)
    verdicts = [
        {comparison.id: comparison.verdict for comparison in judgement.comparisons} for judgement in (full, sketch)
    ]
    assert verdicts[0].keys() == verdicts[1].keys()
    if full.findings:
        first = [judgement.findings[0] for judgement in (full, sketch)]
        assert first[0].module == first[1].module
        assert first[0].comparison.id == first[1].comparison.id


def trace_gpt(folder: Path, **settings: Any) -> Trace:
    torch.manual_seed(0)
    trace_reference(folder, lambda: Gpt(), RULES, **settings)
    return Trace(folder / "reference")


def test_what_is_recorded_in_full_and_what_is_not(tmp_path: Path) -> None:
    full, few = trace_gpt(tmp_path / "full"), trace_gpt(tmp_path / "few", **SKETCH, full=("layers.1.mlp.*",))
    assert full.shards.keys() == few.shards.keys()
    for tensor_id, (shard, *_) in few.shards.items():
        (whole, *_) = full.shards[tensor_id]
        if shard.record.sketch is None:
            assert torch.equal(shard.tensor(), whole.tensor())
            is_small = whole.record.num_bytes <= 256 * 8
            assert is_small or tensor_id.name.startswith("layers.1.mlp") or tensor_id.kind is Kind.INPUT
        else:
            assert tensor_id.kind not in (Kind.BATCH, Kind.DECISION)
            assert shard.read_stored().shape == (256,)
            assert float(shard.read_stored().norm()) == pytest.approx(float(whole.tensor().double().norm()), rel=0.25)
            with pytest.raises(SketchError, match="--full"):
                shard.tensor()
    assert any(shard.record.sketch for shards in few.shards.values() for shard in shards)
    # A full trace is held against a sketch as well as two sketches are.
    assert judge(tmp_path / "few", tmp_path / "full" / "reference").exit is Exit.PASSED
    assert judge(tmp_path / "full", tmp_path / "few" / "reference").exit is Exit.PASSED


def test_updates_follow_from_sketches(tmp_path: Path) -> None:
    full, few = trace_gpt(tmp_path / "full"), trace_gpt(tmp_path / "few", **SKETCH)
    updates = [tensor_id for tensor_id in full.shards if tensor_id.kind is Kind.UPDATE]
    assert updates
    for tensor_id in updates:
        a, b = LogicalTensor.of(full, tensor_id), LogicalTensor.of(few, tensor_id)
        assert a is not None
        assert b is not None
        assert measure(a, b)[0].error < 1e-7


def test_sketches_of_shards_and_summands_add_up(tmp_path: Path) -> None:
    full = draw_tensor(64, 48, seed=1)
    for layout in ("a b/tp", "a/tp b", "a b +tp", "a b"):
        cut = TraceBuilder(tmp_path / layout.replace("/", "_"), "tp=2")
        cut.record_parts("0/0/x/output", full, layout)
        logical = LogicalTensor.of(cut.close(), TensorId.parse("0/0/x/output"))
        assert logical is not None
        whole = TraceBuilder(tmp_path / f"whole-{layout.replace('/', '_')}")
        whole.record_parts("0/0/x/output", full, "...")
        other = LogicalTensor.of(whole.close(), TensorId.parse("0/0/x/output"))
        assert other is not None
        assert torch.allclose(logical.sketched(128), other.sketched(128), atol=1e-5)
