"""Clean candidates on real ranks (processes with gloo), compared with their tolerances.

The models and layouts are those of tests/matrix, two ranks each, all in one launch. float8 is cast in the linear layers
of each rank: ranks with their own data, and pipeline stages, then scale the same tensors as the reference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench._models import Cut, cast_to_float8, divide, widened
from ttrace.judge.verdict import Judgement
from zoo.harness.candidate import Candidate, Cell
from zoo.harness.cells import Traced, judge_all, trace_cell
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import gpt_case
from zoo.harness.transformer import Shape, Transformer

NUM_RANKS = 2
FP32, BF16 = torch.float32, torch.bfloat16
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A layout of the matrix, or `gpt` for tensor parallelism written by hand."""

    layout: str
    dtype: torch.dtype
    num_layers: int = 4
    is_float8: bool = False
    is_wide: bool = False
    """Whether its sums are as long as those of real models."""

    @property
    def name(self) -> str:
        family = "gpt" if self.layout == "gpt" else "moe" if "ep" in self.layout else "llama"
        precision = "fp8" if self.is_float8 else {FP32: "fp32", BF16: "bf16"}[self.dtype]
        layout = "tp" if self.layout == "gpt" else self.layout
        width = " wide" if self.is_wide else ""
        return f"{family} {precision} {self.num_layers}{width} on {layout}={NUM_RANKS}"


def cases(num_layers: int, layouts: Sequence[str]) -> list[Case]:
    """Layouts in both dtypes; where ranks have whole layers, in float8 too."""
    found = [Case(layout, dtype, num_layers) for layout in layouts for dtype in (FP32, BF16)]
    return found + [Case(layout, BF16, num_layers, True) for layout in layouts if layout in ("ddp", "pp-1f1b")]


def judged_on_ranks(found: Sequence[Case], keep: Callable[[Judgement], T]) -> list[T]:
    """Every case, in one launch; what is kept of its judgement."""
    with tempfile.TemporaryDirectory() as folder:
        results: list[T] = on_ranks(NUM_RANKS, _judged, Path(folder), list(found), keep, timeout=1800.0)[0]
    return results


def _judged(folder: Path, found: list[Case], keep: Callable[[Judgement], Any]) -> list[Any]:
    by_hand = {case: gpt_case(folder / case.name, case.dtype, 0) for case in found if case.layout == "gpt"}
    kept = {case: keep(judgement) for case, judgement in by_hand.items() if judgement is not None}
    references: dict[Any, Path] = {}
    others = [case for case in found if case.layout != "gpt"]
    traced = [_traced(case, folder, references) for case in others]
    kept |= dict(zip(others, judge_all(traced, keep), strict=True))
    return [kept.get(case) for case in found]


def _traced(case: Case, folder: Path, references: dict[Any, Path]) -> Traced:
    cell = Cell(case.layout, NUM_RANKS, case.dtype)
    shape = Shape(vocab=48, hidden=16, ffn=24, length=8, num_layers=case.num_layers)
    if case.is_wide:
        shape = replace(widened(shape), length=64)
    folder = folder / f"{case.num_layers}-{shape.hidden}"
    if case.is_float8:
        return trace_cell(cell, folder, shape, references, _to_float8, build=_float8_transformer)
    return trace_cell(cell, folder, shape, references)


def _to_float8(candidate: Candidate) -> None:
    for chunk in candidate.chunks:
        divide(chunk.module if isinstance(chunk, DistributedDataParallel) else chunk, Cut(), cast_to_float8)


def _float8_transformer(shape: Shape) -> nn.Module:
    model = Transformer(shape)
    divide(model, Cut(), cast_to_float8)
    return model
