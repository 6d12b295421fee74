"""A script that changes torch's default dtype is recorded and judged as one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ttrace.judge.check import judge_candidate
from ttrace.trace.reader import Trace
from zoo.harness.gpt import RULES, Gpt
from zoo.harness.plans import planned
from zoo.harness.runs import SimulatedRank, measured_twins, trace_reference, train


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build() -> Gpt:
    torch.manual_seed(0)
    with default_dtype(torch.float32):
        return Gpt()


def break_head(model: nn.Module, rank: int) -> None:  # noqa: ARG001
    model.get_parameter("head.weight").mul_(1.01)


def trace_both(folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Trace a reference with its twins and a candidate, of a float32 model."""
    with default_dtype(dtype):
        trace_reference(folder, build, RULES)
        plan = planned(out=folder / "candidate", role="candidate", reference=folder / "reference")
        train(plan, build(), SimulatedRank(), RULES, break_head)
    return folder / "reference", folder / "candidate"


def test_traces_and_judgements_do_not_depend_on_the_default_dtype(tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        reference, candidate = trace_both(folder, dtype)
        with default_dtype(dtype):
            judgement = judge_candidate(measured_twins(folder), Trace(candidate))
        assert judgement.findings
        values = {
            f"{trace.manifest.role} {shard.id} {shard.record.microbatch}": shard.read_stored()
            for trace in (Trace(reference), Trace(candidate))
            for shards in trace.shards.values()
            for shard in shards
        }
        found.append((values, [(str(c.id), c.verdict, c.stats) for c in judgement.comparisons]))
    (values, verdicts), (others, other_verdicts) = found
    assert values.keys() == others.keys()
    different = [name for name, value in values.items() if not torch.equal(value, others[name])]
    assert not different
    assert verdicts == other_verdicts
