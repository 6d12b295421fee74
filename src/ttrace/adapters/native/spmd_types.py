"""Layouts of plain tensors, from the types that spmd_types adds while its type checking is on.

For each axis a tensor has a type: replicated (R), invariant (I), varying (V) or partial (P). A varying tensor may also
state which dim the axis cuts. The type also determines that of the gradient: the gradient of a replicated
tensor is a pending sum. Only attributes are read, so the package need not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from ttrace.adapters.wrappers import read_spmd_types
from ttrace.layouts import ranges as rg
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Placement, Provenance
from ttrace.layouts.region import Region
from ttrace.layouts.splits import BLOCK, NO_SPLITS, Split

_BY = Provenance(LayoutSource.SPMD_TYPES)


def read_placement(
    tensor: torch.Tensor,
    mesh: Mesh,
    coord: Mapping[str, int],
    apart: Collection[str] = (),
    splits: Mapping[str, Split] = NO_SPLITS,
    *,
    of_gradient: bool = False,
) -> Placement | None:
    """Read the placement of a tensor or of its gradient; None unless it is stated for every axis.

    Ranks along the axes `apart` have different tensors, so what the tensor states for these axes is ignored. Types do
    not state in which order an axis cuts a sequence: `splits` does.
    """
    types, spec = read_spmd_types(tensor)
    if not types:
        return None
    cuts = [_list_entry(entry) for entry in spec] or [() for _ in tensor.shape]
    cutting = {axis for cut in cuts for axis in cut}
    names: dict[Any, list[str]] = {}
    for axis in {*types, *cutting}:
        found = _find_axes(axis, mesh)
        if found is None:
            return None
        names[axis] = [name for name in found if name not in apart]
    is_open = any(kind.value == "V" and names[axis] and axis not in cutting for axis, kind in types.items())
    if is_open or len(cuts) != tensor.ndim:
        return None
    summed = "R" if of_gradient else "P"
    pending = [name for axis, kind in types.items() if kind.value == summed for name in names[axis]]
    dims = [[name for axis in cut for name in names[axis]] for cut in cuts]
    words = ["/".join([f"d{dim}", *cut]) for dim, cut in enumerate(dims)] + [f"+{name}" for name in pending]
    return Placement(_find_region(tensor, dims, mesh, coord, splits), tuple(pending), " ".join(words), _BY)


def _find_region(
    tensor: torch.Tensor, dims: list[list[str]], mesh: Mesh, coord: Mapping[str, int], splits: Mapping[str, Split]
) -> Region:
    """Find the region of this rank: all ranks hold equal shares, and the first axis of a dim is outermost."""
    shape = [
        size * math.prod(mesh.sizes[name] for name in names) for size, names in zip(tensor.shape, dims, strict=True)
    ]
    held = [rg.whole(size) for size in shape]
    for dim, names in enumerate(dims):
        for name in names:
            inner = splits.get(name, BLOCK).ranges(rg.length(held[dim]), coord[name], mesh.sizes[name])
            held[dim] = rg.select(held[dim], inner)
    return Region(tuple(shape), tuple(held))


def _list_entry(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@lru_cache(maxsize=256)  # a step has many tensors with few different axes
def _find_axes(axis: Any, mesh: Mesh) -> tuple[str, ...] | None:
    """Find the axes of a mesh that form an axis of spmd_types, which is given by sizes and strides of ranks."""
    found: list[str] = []
    for size, stride in axis.layout.sizes_and_strides:
        names = next((names for names, *own in _list_runs(mesh) if own == [size, stride]), None)
        if size > 1 and names is None:
            return None
        found += names or ()
    return tuple(found)


def _list_runs(mesh: Mesh) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """List runs of adjacent axes, each with its number of ranks and their stride."""
    for part in mesh.factorisations:
        axes = [(name, size) for name, size in part if size > 1]
        for end in range(len(axes), 0, -1):
            stride = math.prod(size for _, size in axes[end:])
            for start in reversed(range(end)):
                run = axes[start:end]
                yield tuple(name for name, _ in run), math.prod(size for _, size in run), stride
