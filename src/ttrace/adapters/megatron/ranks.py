"""Mesh of a Megatron job, read from its process groups.

Dense modules see the ranks as pp x dp x cp x tp, experts as pp x edp x ep x tp: two factorisations of the same ranks.
An expert's own tensor parallelism is called `etp` if it differs from that of the dense modules.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ttrace.errors import CaptureError, LayoutError
from ttrace.layouts.mesh import Mesh

_DENSE = {
    "tp": ("get_tensor_model_parallel_group",),
    "cp": ("get_context_parallel_group",),
    "dp": ("get_data_parallel_group",),
    "pp": ("get_pipeline_model_parallel_group",),
}
"""By axis, the functions that return its group; newer names come first."""
_EXPERT = {
    "etp": ("get_expert_tensor_parallel_group", "get_tensor_model_parallel_group"),
    "ep": ("get_expert_model_parallel_group",),
    "edp": ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group"),
    "pp": ("get_pipeline_model_parallel_group",),
}


@dataclass(frozen=True)
class _Axis:
    name: str
    size: int
    stride: int


def read_mesh(*, has_experts: bool) -> Mesh:
    """Read the mesh of all ranks from Megatron's groups."""
    if not dist.is_initialized():
        return Mesh()
    state = importlib.import_module("megatron.core.parallel_state")
    dense = [_read_axis(state, name, getters) for name, getters in _DENSE.items()]
    factorisations = [_sort_axes(dense)]
    if has_experts:
        tp = next(axis for axis in dense if axis.name == "tp")
        expert = [_read_axis(state, name, getters) for name, getters in _EXPERT.items()]
        renamed = [_Axis("tp", a.size, a.stride) if (a.name, a.size) == ("etp", tp.size) else a for a in expert]
        factorisations.append(_sort_axes(renamed))
    try:
        return Mesh(tuple(factorisations))
    except LayoutError as error:
        raise CaptureError(f"Megatron's process groups do not lie like axes: {error}") from None


def _read_axis(state: Any, name: str, getters: Iterable[str]) -> _Axis:
    getter = next((getattr(state, getter) for getter in getters if hasattr(state, getter)), None)
    ranks = dist.get_process_group_ranks(getter()) if getter is not None else [dist.get_rank()]
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(steps) > 1:
        raise CaptureError(f"Megatron's group of axis {name} has ranks {ranks}, which are not evenly spaced.")
    return _Axis(name, len(ranks), steps.pop() if steps else 0)


def _sort_axes(axes: Iterable[_Axis]) -> tuple[tuple[str, int], ...]:
    """Sort the axes, slowest first. An axis of a single rank has no stride and may be anywhere."""
    return tuple((axis.name, axis.size) for axis in sorted(axes, key=lambda axis: -axis.stride))
