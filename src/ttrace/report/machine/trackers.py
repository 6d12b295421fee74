"""Errors and tolerances along the depth of a model, for tools that draw curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import Kind
from ttrace.report.depth import Depth

_CURVES = {
    "forward": (Kind.OUTPUT,),
    "backward": (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT),
    "gradients": (Kind.PARAM_GRAD,),
    "updates": (Kind.UPDATE,),
}


@dataclass(frozen=True)
class Point:
    """The worst tensor of one kind at one place."""

    curve: str
    depth: int
    """The place along the model, in the order of the forward pass."""
    name: str
    """The module or parameter."""
    error: float
    tolerance: float


def list_points(comparisons: Sequence[Comparison]) -> list[Point]:
    """List the points of all curves, each curve in the order of depth."""
    places = Depth.of(comparisons).places
    found: list[Point] = []
    for curve, kinds in _CURVES.items():
        worst: dict[int, Comparison] = {}
        for place, comparison in zip(places, comparisons, strict=True):
            if comparison.id.kind in kinds and comparison.tolerance is not None:
                known = worst.get(place)
                if known is None or comparison.excess > known.excess:
                    worst[place] = comparison
        for place, comparison in sorted(worst.items(), key=lambda item: item[0]):
            assert comparison.tolerance is not None
            found.append(Point(curve, place, comparison.id.name, comparison.error, comparison.tolerance.value))
    return found
