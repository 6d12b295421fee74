"""A wrong annotation needs no new trace, where what was recorded does not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, TraceBuilder, draw_tensor
from ttrace.errors import LayoutError
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.layouts.region import Region
from ttrace.layouts.rules import Rules
from ttrace.trace.format import End, Manifest, Record, SketchInfo
from ttrace.trace.reader import Trace
from ttrace.trace.relayout import RelayoutTrace
from ttrace.trace.writer import Writer
from ttrace.values.generate import Normal

ID = "0/0/fc/output"


def recorded(folder: Path, layout: str, held: str) -> tuple[Trace, Trace, Trace]:
    """Reference, twin and a candidate that holds a tensor by one layout and says that it does by another."""
    case = Case(folder)
    case.add_right("0/0/a/output")
    full = draw_tensor(4, 8)
    case.add_trusted(ID, full)
    for rank in range(2):
        part = Layout.parse(held).region((4, 8), {"tp": 2}, {"tp": rank}).take(full)
        case.candidate.record(rank, ID, part, layout, shape=(4, 8))
    return case.reference.close(), case.twin.close(), case.candidate.close()


def judge(traces: tuple[Trace, Trace, Trace], rules: dict[str, str]) -> Judgement:
    reference, twin, candidate = traces
    return check(reference, [twin], RelayoutTrace(candidate.folder, Rules.of(rules), reference))


def test_the_right_rule_makes_a_wrong_annotation_right(tmp_path: Path) -> None:
    reference, twin, candidate = traces = recorded(tmp_path, "a b/tp", "a b/tp:striped")
    assert check(reference, [twin], candidate).exit is Exit.FOUND
    assert judge(traces, {"other": "..."}).exit is Exit.FOUND
    found = judge(traces, {"fc/output": "a b/tp:striped"})
    assert found.exit is Exit.PASSED
    (told,) = [comparison for comparison in found.comparisons if comparison.id.name == "fc"]
    assert (told.layout, told.by) == ("a b/tp:striped", Provenance(LayoutSource.RULE, 'rule "fc/output"'))


def test_the_right_rule_can_be_wrong_as_well(tmp_path: Path) -> None:
    traces = recorded(tmp_path, "a b/tp", "a b/tp")
    assert judge(traces, {"fc/output": "a b/tp:striped"}).exit is Exit.FOUND
    with pytest.raises(LayoutError, match="cuts dim a over tp=2, but this rank holds shape"):
        judge(traces, {"fc/output": "a/tp b"})
    with pytest.raises(LayoutError, match="axis dp"):
        judge(traces, {"fc/output": "a/dp b"})


def test_a_rule_that_matches_nothing_is_told(tmp_path: Path) -> None:
    found = judge(recorded(tmp_path, "a b/tp", "a b/tp"), {"typo/output": "a b/tp"})
    assert 'rule "typo/output" matched nothing' in found.notes


def one(folder: Path, **known: object) -> RelayoutTrace:
    """The first of two ranks, with one record, read by a rule of another layout."""
    reference = TraceBuilder(folder / "reference", role="reference")
    reference.record(0, ID, draw_tensor(4, 8), "a b")
    writer = Writer(folder / "one", Manifest(role="candidate", rank=0, num_ranks=2, mesh="tp=2", seed=0))
    region = Layout.parse("a b/tp").region((4, 8), {"tp": 2}, {"tp": 0})
    record = Record(TensorId.parse(ID), (4, 4), torch.float32, region, **known)  # type: ignore[arg-type]
    stored = torch.zeros(record.stored_form[0], dtype=record.stored_form[1])
    writer.write(record, stored)
    writer.close(End(num_steps=1))
    return RelayoutTrace(folder / "one", Rules.of({"fc/output": "a b/tp:striped"}), reference.close())


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"sketch": SketchInfo(64)}, "its sketch was computed for the recorded layout"),
        ({"values": Normal(0.0, 1.0)}, "generated for the recorded layout"),
    ],
)
def test_what_was_made_for_its_region_stays_there(tmp_path: Path, known: dict[str, object], words: str) -> None:
    with pytest.raises(LayoutError, match=f'rule "fc/output" cannot be applied to a recorded trace, because .*{words}'):
        _ = one(tmp_path, **known).shards


@pytest.mark.parametrize("source", [LayoutSource.DTENSOR, LayoutSource.HOLDS, LayoutSource.ROUTING])
def test_what_states_itself_is_left_to_do_so(tmp_path: Path, source: LayoutSource) -> None:
    (shard,) = one(tmp_path, by=Provenance(source)).shards[TensorId.parse(ID)]
    assert shard.record.region == Region((4, 8), (((0, 4),), ((0, 4),)))


def test_a_rule_precedes_what_an_input_states_as_in_a_run(tmp_path: Path) -> None:
    """tests/capture/resolve/test_layout_resolver.py has the same for a run."""
    (shard,) = one(tmp_path, by=Provenance(LayoutSource.HOLDS_OF_INPUT)).shards[TensorId.parse(ID)]
    assert shard.record.source is LayoutSource.RULE
    assert shard.record.layout == "a b/tp:striped"
