"""Clean runs and look-alikes of bugs, none of which may be accused."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ttrace.judge.verdict import Exit
from zoo import lookalikes
from zoo.bug import Case, Judge, Patch
from zoo.harness.candidate import Cell
from zoo.harness.cells import LAYOUTS
from zoo.harness.cover import NUM_RANKS
from zoo.harness.small import Small
from zoo.harness.transformer import Shape
from zoo.launch import by_ttrace, seen
from zoo.lookalikes import Lookalike
from zoo.seen import Seen

MOST_RANKS = 4
FLOAT8 = ("ddp", "zero", "fsdp", "hsdp", "pp-gpipe", "pp-1f1b", "pp-interleaved", "pp-zbv", "moe+ddp", "moe+fsdp")
"""The layouts under which a rank computes the same products as one process does, so that float8 scales are the same."""
FLOAT8_IN_PARTS = ("tp", "tp+sp", "cp-gather", "cp-ulysses", "cp-ring")
"""Those under which it computes parts of them. In bfloat16 only, in which float8 models are trained: in float32,
twins almost never change how a cast rounds, so they do not predict it (docs/explanation/what-it-cannot-see.md)."""
NUM_SEEDS = 2


@dataclass(frozen=True)
class Control:
    """A run in which nothing is wrong, by name; ranks look it up."""

    name: str

    @property
    def case(self) -> Case:
        return controls()[self.name].case

    @property
    def patch(self) -> Patch | None:
        return controls()[self.name].patch

    @property
    def is_early(self) -> bool:
        return False

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, so that not everything can be judged."""
        return controls()[self.name].is_random

    def __str__(self) -> str:
        return self.name

    def is_accused(self, found: Seen) -> bool:
        return found.exit is not (Exit.UNJUDGED if self.is_random else Exit.PASSED)


@functools.cache
def controls() -> Mapping[str, Lookalike]:
    """Return all controls: look-alikes first, then float8, then every parallelism."""
    found = dict(lookalikes.all_of_them())
    found |= {f"fp8-{one.cell.name}": Lookalike(one) for one in _float8()}
    return found | {f"{one.cell.name}-{one.cell.seed}": Lookalike(one) for one in _parallel()}


def few() -> list[Control]:
    """Return the controls that every submission runs: each look-alike, and float8 under two layouts."""
    names = [name for name, one in lookalikes.all_of_them()]
    return [Control(name) for name in [*names, "fp8-fsdp-bfloat16-none-2", "fp8-cp-ring-bfloat16-none-2"]]


def every() -> list[Control]:
    return [Control(name) for name in controls()]


def _float8() -> Iterator[Small]:
    in_parts = itertools.product(FLOAT8_IN_PARTS, (torch.bfloat16,))
    for layout, dtype in (*itertools.product(FLOAT8, (torch.float32, torch.bfloat16)), *in_parts):
        cell = Cell(layout, NUM_RANKS.get(layout, 2), dtype, num_microbatches=4 if layout.startswith("pp") else 2)
        yield Small(cell, Shape(adapt=lookalikes.in_float8))


def _parallel() -> Iterator[Small]:
    """Every layout in both dtypes, plain on two draws of all values and recomputed on one."""
    shape = Shape(vocab=48, hidden=16, ffn=24, length=8)
    for layout in LAYOUTS:
        num_ranks = NUM_RANKS.get(layout, 2)
        if num_ranks > MOST_RANKS:
            continue
        plain = Cell(layout, num_ranks, num_microbatches=4 if layout.startswith("pp") else 2)
        for dtype in (torch.float32, torch.bfloat16):
            yield from (Small(replace(plain, dtype=dtype, seed=seed), shape) for seed in range(NUM_SEEDS))
            yield Small(replace(plain, dtype=dtype, recompute="full"), shape)


@dataclass(frozen=True)
class Clean:
    """The results of the controls."""

    found: Mapping[Control, Seen]
    seconds: float

    @property
    def accused(self) -> dict[str, Seen]:
        return {control.name: one for control, one in self.found.items() if control.is_accused(one)}

    @property
    def noted(self) -> dict[str, tuple[str, ...]]:
        """What was noted of collectives: nothing, in cases that communicate rightly."""
        return {control.name: one.communication for control, one in self.found.items() if one.communication}

    def as_json(self) -> dict[str, Any]:
        return {
            "controls": len(self.found),
            "accused": {name: [one.sentence, *one.trouble] for name, one in self.accused.items()},
            "noted": self.noted,
            "tensors": sum(one.num_tensors for one in self.found.values()),
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        lines = [f"{name}: {one.module}/{one.kind} {one.sentence} {one.trouble}" for name, one in self.accused.items()]
        notes = [f"{name}: note: {note}" for name, found in self.noted.items() for note in found]
        facts = self.as_json()
        counts = f"{len(lines)} accused, {len(notes)} notes on their collectives"
        last = f"{facts['controls']} controls, {facts['tensors']} tensors: {counts}; {self.seconds:.0f} s"
        return "\n".join([*lines, *notes, last])


def run(chosen: Sequence[Control], tell: Callable[[str], None] = lambda _: None, *, judge: Judge = by_ttrace) -> Clean:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = seen(chosen, Path(folder), tell, judge=judge)
    return Clean(found, time.monotonic() - begin)
