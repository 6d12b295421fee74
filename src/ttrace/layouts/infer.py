"""Inference of a layout that is not stated, if exactly one layout explains the shapes that all ranks hold.

Pending sums and orderings are never inferred: a missing all-reduce looks exactly like a pending sum. An axis is
assumed to cut in blocks, unless the framework states how it cuts. An inferred layout is checked like any other, so a
wrong one can cause a failure but not a silent pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ttrace.layouts.ids import Kind
from ttrace.layouts.layout import Cut, Dim, Layout
from ttrace.layouts.mesh import Coord
from ttrace.layouts.region import Region, Shape, measure_coverage
from ttrace.layouts.splits import BLOCK, Split

HeldShapes = Sequence[tuple[Coord, Shape]]
"""The local shape that each rank holds."""
Splits = Mapping[str, Split]
"""The axes for which the framework states how they cut, each with its split."""
_NONE: Splits = {}


def infer_layout(shape: Shape, held: HeldShapes, sizes: Mapping[str, int], splits: Splits = _NONE) -> Layout | None:
    """Infer the one layout without pending sums that gives every rank the shape it holds; None if it is not unique.

    Layouts that give every rank the same region count as one, because axes of different factorisations may cut the same
    way. If some layout covers the whole tensor, layouts that leave gaps are dropped: they cut along an axis on which
    all ranks have the same position. If several layouts remain, the one that cuts along all axes with a stated split is
    used, because these axes are known to cut something.
    """
    if not held or any(len(local) != len(shape) for _, local in held):
        return None
    axes = [axis for axis, size in sizes.items() if size > 1]
    choices = [_list_dim_choices(dim, shape, held, axes) for dim in range(len(shape))]
    layouts = []
    for cuts in itertools.product(*choices):
        used = [axis for dim in cuts for axis in dim]
        if len(used) != len(set(used)):
            continue
        dims = tuple(
            Dim(f"d{i}", tuple(Cut(axis, splits.get(axis, BLOCK)) for axis in dim)) for i, dim in enumerate(cuts)
        )
        layout = Layout(dims)
        if all(layout.local_shape(shape, sizes, coord) == local for coord, local in held):
            layouts.append(layout)
    if len(layouts) > 1 and splits:
        layouts = [layout for layout in layouts if splits.keys() <= layout.axes]
    return layouts[0] if len(layouts) == 1 else _choose_distinct(layouts, shape, [coord for coord, _ in held], sizes)


def find_pending_axes(kind: Kind, layout: Layout, batch_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which an inferred tensor is a pending sum because ranks along them have different rows.

    For a tensor that these ranks share, such as a position embedding, each rank computes a part of the gradient.
    """
    return tuple(axis for axis in batch_axes if axis not in layout.axes) if kind.is_activation_grad else ()


def _choose_distinct(
    layouts: list[Layout], shape: Shape, coords: list[Coord], sizes: Mapping[str, int]
) -> Layout | None:
    """Choose the layout if all give the same regions, or the only one without gaps; None if there is no such layout."""
    regions: dict[tuple[Region, ...], Layout] = {}
    for layout in layouts:
        regions.setdefault(tuple(layout.region(shape, sizes, coord) for coord in coords), layout)
    complete = [layout for held, layout in regions.items() if not measure_coverage(held).num_gap]
    chosen = complete or list(regions.values())
    return chosen[0] if len(chosen) == 1 else None


def _list_dim_choices(dim: int, shape: Shape, held: HeldShapes, axes: list[str]) -> list[tuple[str, ...]]:
    """List how this dim may be cut: not at all, by one axis, or by two nested axes."""
    if all(local[dim] == shape[dim] for _, local in held):
        return [()]
    return [(axis,) for axis in axes] + list(itertools.permutations(axes, 2))
