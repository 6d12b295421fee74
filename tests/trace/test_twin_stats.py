"""Twins that are measured while they run give the same stats as stored ones, in a fraction of the space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_traces import manifest
from ttrace.errors import SketchError, TraceError
from ttrace.judge.check import check
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Record
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Trace
from ttrace.trace.tensor_bytes import ArrivedBytes, view_memory
from ttrace.trace.twin_stats import Counterpart
from ttrace.trace.writer import Writer
from ttrace.values.stats import Stats, compare_pair
from zoo.harness.gpt import RULES, Gpt
from zoo.harness.plans import planned
from zoo.harness.runs import SimulatedRank, train

GRADIENT, BEFORE, AFTER, UPDATE = (
    TensorId.of(0, None, "fc.weight", kind) for kind in (Kind.PARAM_GRAD, Kind.PARAM, Kind.PARAM_AFTER, Kind.UPDATE)
)


def trace(folder: Path, **settings: Any) -> Trace:
    torch.manual_seed(0)
    train(planned(out=folder, num_steps=2, **settings), Gpt(), SimulatedRank(), RULES)
    return Trace(folder)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Trace a reference of two steps, and the same twin twice: stored, and measured."""
    folder = tmp_path_factory.mktemp("twins")
    reference = trace(folder / "reference")
    stored = trace(folder / "stored", role="twin", twin=1, reference=reference.folder, full=("*",))
    measured = trace(folder / "measured", role="twin", twin=1, reference=reference.folder)
    return {"reference": reference, "stored": stored, "measured": measured}


def test_a_measured_twin_has_the_stats_of_a_stored_one(traces: dict[str, Trace]) -> None:
    stored, measured = (ToleranceModel.measure(traces["reference"], [traces[name]]) for name in ("stored", "measured"))
    assert stored.stats.keys() == measured.stats.keys() == traces["reference"].shards.keys()
    for tensor_id, (wanted,) in stored.stats.items():
        (found,) = measured.stats[tensor_id]
        assert (found.count, found.nan_b) == (wanted.count, wanted.nan_b), tensor_id
        sums = [(getattr(found, name), getattr(wanted, name)) for name in ("aa", "bb", "dd", "ab")]
        assert all(ours == pytest.approx(theirs, rel=1e-9, abs=1e-30) for ours, theirs in sums), tensor_id
        assert measured.tolerances[tensor_id].value == pytest.approx(stored.tolerances[tensor_id].value), tensor_id


def test_a_twin_of_sketches_is_measured_by_sketches(tmp_path: Path) -> None:
    settings = {"record": "sketch", "num_buckets": 64}
    reference = trace(tmp_path / "reference", **settings)
    assert reference.has_sketches
    known = {"role": "twin", "twin": 1, "reference": reference.folder}
    stored, measured = trace(tmp_path / "a", full=("*",), **known), trace(tmp_path / "b", **settings, **known)
    wanted, found = (ToleranceModel.measure(reference, [twin]) for twin in (stored, measured))
    assert found.stats.keys() == wanted.stats.keys() == reference.shards.keys()
    for tensor_id, (stats,) in wanted.stats.items():
        (ours,) = found.stats[tensor_id]
        assert ours.count == stats.count, tensor_id
        assert ours.dd == pytest.approx(stats.dd, rel=1e-6, abs=1e-25), tensor_id
    kinds = {(record.id.step, record.id.kind) for rank in measured.ranks for record in rank.records if not record.stats}
    assert kinds == {(1, Kind.PARAM), (1, Kind.PARAM_AFTER)}


def test_a_measured_twin_stores_only_what_later_steps_need(traces: dict[str, Trace]) -> None:
    records = [record for rank in traces["measured"].ranks for record in rank.records]
    stored = [record.id for record in records if record.stats is None]
    assert {(tensor_id.step, tensor_id.kind) for tensor_id in stored} == {(1, Kind.PARAM), (1, Kind.PARAM_AFTER)}
    with pytest.raises(SketchError, match=r"words/output was measured against another run .* --full 'words/output'"):
        traces["measured"].shards[TensorId.parse("0/0/words/output")][0].tensor()


def test_a_twin_of_another_reference_is_refused(traces: dict[str, Trace], tmp_path: Path) -> None:
    (tmp_path / "other.launch").write_text("f" * 32)
    other = trace(tmp_path / "other", launch="f" * 32)
    with pytest.raises(TraceError, match=r"was not measured against .*, but against a different trace"):
        check(other, [traces["measured"]], other)


def write(folder: Path, tensors: dict[TensorId, torch.Tensor], counterpart: Counterpart | None = None) -> RankTrace:
    writer = Writer(folder, manifest(), counterpart=counterpart)
    for tensor_id, tensor in tensors.items():
        writer.write(Record(tensor_id, tuple(tensor.shape), tensor.dtype, Region.whole(tuple(tensor.shape))), tensor)
    writer.close(End(num_steps=1))
    return RankTrace(folder / "rank-00000")


def test_noise_dominated_elements_are_left_out_and_newly_nonzero_ones_remembered(tmp_path: Path) -> None:
    """An element that is nonzero in this run's gradient only is noise-dominated too."""
    torch.manual_seed(0)
    gradient, before = torch.randn(40, 50), torch.randn(40, 50)
    gradient[3], gradient[7, :5] = 0.0, 1e-7
    nudged = gradient * (1 + 1e-6 * torch.randn(40, 50))
    nudged[3, 11], nudged[7, :5] = 1e-9, -1e-7
    after, moved = before - 0.01 * gradient.sign(), before - 0.01 * nudged.sign()
    reference = write(tmp_path / "a", {BEFORE: before, GRADIENT: gradient, AFTER: after})
    twin = write(tmp_path / "b", {BEFORE: before, GRADIENT: nudged, AFTER: moved}, Counterpart(reference))
    found = {record.id: record for record in twin.records}
    assert list(found) == [BEFORE, GRADIENT, AFTER, UPDATE]
    assert twin.read_stored(found[GRADIENT]).tolist() == [3 * 50 + 11]
    stats = {tensor_id: record.stats or Stats() for tensor_id, record in found.items()}
    assert stats[GRADIENT].error == pytest.approx(compare_pair(gradient, nudged).error)
    for tensor_id in (AFTER, UPDATE):
        assert (stats[tensor_id].count, stats[tensor_id].dd) == (2000, 0.0), (
            "all elements that differ are noise-dominated"
        )
    assert stats[UPDATE].aa == pytest.approx(1e-4 * (2000 - 50 - 5), rel=1e-4)


def test_indices_of_elements_that_are_not_there_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", manifest())
    whole = Record(GRADIENT, (4, 6), torch.float32, Region.whole((4, 6)), stats=Stats(count=24))
    indices = torch.tensor([3, 24])
    writer.write(whole, ArrivedBytes((2,), torch.int64, indices.nbytes, view_memory(indices)))
    writer.close(End(num_steps=1))
    logical = LogicalTensor.of(Trace(tmp_path / "a"), GRADIENT)
    assert logical is not None
    used = logical.find_used()
    assert used is not None
    with pytest.raises(TraceError, match="indices outside of the tensor"):
        used.tensor()


@pytest.mark.parametrize("change", ["shape", "dtype", "region", "pending", "absent"])
def test_what_has_no_counterpart_is_stored(tmp_path: Path, change: str) -> None:
    site = TensorId.of(0, 0, "fc", Kind.OUTPUT)
    theirs = Record(site, (4, 6), torch.float32, Region.whole((4, 6)))
    ours = {
        "shape": Record(site, (6, 4), torch.float32, Region.whole((6, 4))),
        "dtype": Record(site, (4, 6), torch.float64, Region.whole((4, 6))),
        "region": Record(site, (4, 6), torch.float32, Region((8, 6), (((0, 4),), ((0, 6),)))),
        "pending": Record(site, (4, 6), torch.float32, Region.whole((4, 6)), ("mb",)),
        "absent": Record(site.at(Kind.INPUT), (4, 6), torch.float32, Region.whole((4, 6))),
    }[change]
    writer = Writer(tmp_path / "a", manifest())
    writer.write(theirs, torch.ones(4, 6))
    writer.close(End(num_steps=1))
    twin = Writer(tmp_path / "b", manifest(), counterpart=Counterpart(RankTrace(tmp_path / "a" / "rank-00000")))
    twin.write(ours, torch.ones(ours.shape, dtype=ours.dtype))
    twin.close(End(num_steps=1))
    (record,) = RankTrace(tmp_path / "b" / "rank-00000").records
    assert record.stats is None
