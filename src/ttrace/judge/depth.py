"""Errors along the layers of a model: the pattern that rounding follows, and notes on departures from it.

Independent rounding errors add up like the square root of the number of layers. A reference whose own error grows far
faster is unstable, and therefore has wide tolerances. A clean candidate has errors like the twins', in the first layers
and in the last. If its errors grow faster than theirs, something is wrong even if every tensor passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.ids import Kind

UNSTABLE_GROWTH = 4.0
"""A reference's error above this many times the square root of the layers passed is unstable.

Clean transformers reach 1.23 (docs/explanation/tolerance.md, "Along the layers").
"""
FEW = 6
"""With fewer layers there is no pattern. Chosen, not measured."""
DEPARTED = 2.0
"""A candidate departs if its ratio to the twins' error exceeds this, and this many times that of the first layers.

Clean candidates reach 1.15 (docs/explanation/tolerance.md, "Along the layers").
"""

_WORDS = {
    Kind.OUTPUT: "outputs",
    Kind.GRAD_OUTPUT: "gradients of outputs",
    Kind.PARAM_GRAD: "parameter gradients",
}
"""The kinds that are examined."""


def note_depth(comparisons: Sequence[Comparison]) -> list[str]:
    """Note what is unusual along the layers of reference and candidate; nothing fails for it."""
    return [note for line in _find_lines(comparisons) for note in (*_note_unstable(line), *_note_departure(line))]


@dataclass(frozen=True)
class _Line:
    """The comparisons of one kind in a stack of layers, in the order in which errors grow."""

    stack: str
    kind: Kind
    layers: Mapping[int, Sequence[Comparison]]

    def span(self, layers: Sequence[int]) -> str:
        ends = f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        return f"{self.stack}.{ends}" if self.stack else ends


def _find_lines(comparisons: Sequence[Comparison]) -> Iterator[_Line]:
    found: dict[tuple[str, Kind], dict[int, list[Comparison]]] = {}
    for comparison in comparisons:
        place = layer_of(comparison.id.name)
        if comparison.id.kind in _WORDS and comparison.tolerance is not None and place is not None:
            stack, layer = place
            found.setdefault((stack, comparison.id.kind), {}).setdefault(layer, []).append(comparison)
    for (stack, kind), layers in found.items():
        if len(layers) >= FEW:
            # Backward runs through the last layer first.
            yield _Line(stack, kind, {layer: layers[layer] for layer in sorted(layers, reverse=kind.is_backward)})


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the stack of layers of a module or parameter and its layer there: the first number in its name."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def _note_unstable(line: _Line) -> Iterator[str]:
    """Note if the reference's own error grows far faster than the square root; parameter gradients only follow."""
    if line.kind is Kind.PARAM_GRAD:
        return
    errors = {
        layer: _find_typical(c.tolerance.twin_error for c in found if c.tolerance)
        for layer, found in line.layers.items()
    }
    floor = max(c.tolerance.floor for found in line.layers.values() for c in found if c.tolerance)
    layers = list(errors)
    first = max(errors[layers[0]], floor)
    excess = {layer: errors[layer] / (first * math.sqrt(passed)) for passed, layer in enumerate(layers, start=1)}
    worst = max(layers, key=lambda layer: excess[layer])
    if excess[worst] > UNSTABLE_GROWTH:
        yield (
            f"the reference's own error grows far beyond the square root of depth: {_WORDS[line.kind]} from "
            f"{first:.1e} at {line.span(layers[:1])} to {errors[worst]:.1e} at {line.span([worst])}, "
            f"{excess[worst]:.0f} x what rounding adds up to. Tolerances there are as wide, and hide errors "
            "of that size"
        )


def _note_departure(line: _Line) -> Iterator[str]:
    """Note if the candidate's errors grow faster than the twins', with every tensor within its margin."""
    ratios = {
        layer: _find_typical(r for c in found if (r := _measure_ratio(c)) is not None)
        for layer, found in line.layers.items()
    }
    layers = list(ratios)
    third = len(layers) // 3
    before, after = (
        _find_typical(ratios[layer] for layer in layers[:third]),
        _find_typical(ratios[layer] for layer in layers[-third:]),
    )
    if after > DEPARTED * max(1.0, before):
        yield (
            f"the candidate departs from the twins' pattern along depth: {_WORDS[line.kind]} err {before:.1f} x the "
            f"estimate at {line.span(layers[:third])}, {after:.1f} x at {line.span(layers[-third:])}. Each is "
            "within its margin, but with rounding alone the ratio would stay the same"
        )


def _measure_ratio(comparison: Comparison) -> float | None:
    """Return the ratio of observed to estimated error of a tensor that passed."""
    tolerance = comparison.tolerance
    if comparison.verdict is not Verdict.PASS or tolerance is None:
        return None
    estimate = max(tolerance.twin_error, tolerance.floor)
    return comparison.error / estimate if estimate > 0.0 else None


def _find_typical(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])
