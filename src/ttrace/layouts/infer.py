"""Inference of a layout that nobody stated, if exactly one explains what all ranks hold.

Pending sums and orderings are never inferred: a missing all-reduce looks exactly like a pending sum. An axis cuts in
blocks, unless a framework stated how it cuts. A wrong inference is checked like any other layout, so it can fail but
not pass silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ttrace.layouts.layout import Cut, Dim, Layout
from ttrace.layouts.splits import BLOCK, Split
from ttrace.tensors.coverage import measure_coverage
from ttrace.tensors.ids import Kind
from ttrace.tensors.mesh import Coord
from ttrace.tensors.region import Region, Shape

HeldShapes = Sequence[tuple[Coord, Shape]]
"""The local shape that each rank was seen to hold."""
Splits = Mapping[str, Split]
"""The axes of which a framework stated how they cut."""
_NONE: Splits = {}


def infer_layout(shape: Shape, held: HeldShapes, sizes: Mapping[str, int], splits: Splits = _NONE) -> Layout | None:
    """The one layout without pending sums that gives every rank the shape it holds, or None.

    Layouts that give every rank the same region are one: axes of several factorisations may lie alike. And where one
    layout holds all of the tensor, those that leave gaps explain nothing: an axis on which all ranks sit alike. Of what
    is left, the one that cuts along all axes with a stated split: those are known to cut something.
    """
    if not held or any(len(local) != len(shape) for _, local in held):
        return None
    axes = [axis for axis, size in sizes.items() if size > 1]
    choices = [_dim_choices(dim, shape, held, axes) for dim in range(len(shape))]
    fitting = []
    for cuts in itertools.product(*choices):
        used = [axis for dim in cuts for axis in dim]
        if len(used) != len(set(used)):
            continue
        dims = tuple(
            Dim(f"d{i}", tuple(Cut(axis, splits.get(axis, BLOCK)) for axis in dim)) for i, dim in enumerate(cuts)
        )
        layout = Layout(dims)
        if all(layout.local_shape(shape, sizes, coord) == local for coord, local in held):
            fitting.append(layout)
    if len(fitting) > 1 and splits:
        fitting = [layout for layout in fitting if splits.keys() <= layout.axes]
    return fitting[0] if len(fitting) == 1 else _distinct(fitting, shape, [coord for coord, _ in held], sizes)


def find_pending_axes(kind: Kind, layout: Layout, batch_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which an inferred tensor is a pending sum because they divide the rows of a batch.

    What ranks with different rows share, a position embedding for instance, gets a part of its gradient on each.
    """
    return tuple(axis for axis in batch_axes if axis not in layout.axes) if kind.is_activation_grad else ()


def _distinct(layouts: list[Layout], shape: Shape, coords: list[Coord], sizes: Mapping[str, int]) -> Layout | None:
    """The one among these that all others agree with, or that alone leaves no gap."""
    regions: dict[tuple[Region, ...], Layout] = {}
    for layout in layouts:
        regions.setdefault(tuple(layout.region(shape, sizes, coord) for coord in coords), layout)
    complete = [layout for held, layout in regions.items() if not measure_coverage(held).num_gap]
    chosen = complete or list(regions.values())
    return chosen[0] if len(chosen) == 1 else None


def _dim_choices(dim: int, shape: Shape, held: HeldShapes, axes: list[str]) -> list[tuple[str, ...]]:
    """How this dim may be cut: not at all, by one axis, or by two nested ones."""
    if all(local[dim] == shape[dim] for _, local in held):
        return [()]
    return [(axis,) for axis in axes] + list(itertools.permutations(axes, 2))
