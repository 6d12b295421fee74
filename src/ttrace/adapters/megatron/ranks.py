"""Mesh of a Megatron job, read from its process groups.

Dense modules see the ranks as pp x dp x cp x tp, experts as pp x edp x ep x tp: two factorisations of the same ranks.
An expert's own tensor parallelism is called `etp` where it is not that of the dense modules.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ttrace.errors import CaptureError, LayoutError
from ttrace.tensors.mesh import Mesh

_DENSE = {
    "tp": ("get_tensor_model_parallel_group",),
    "cp": ("get_context_parallel_group",),
    "dp": ("get_data_parallel_group",),
    "pp": ("get_pipeline_model_parallel_group",),
}
"""By axis, what returns its group; names that came later stand first."""
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


def mesh(*, has_experts: bool) -> Mesh:
    """The mesh of all ranks, as Megatron's groups cut them."""
    if not dist.is_initialized():
        return Mesh()
    state = importlib.import_module("megatron.core.parallel_state")
    dense = [_axis(state, name, getters) for name, getters in _DENSE.items()]
    factorisations = [_factorisation(dense)]
    if has_experts:
        tp = next(axis for axis in dense if axis.name == "tp")
        expert = [_axis(state, name, getters) for name, getters in _EXPERT.items()]
        named = [_Axis("tp", a.size, a.stride) if (a.name, a.size) == ("etp", tp.size) else a for a in expert]
        factorisations.append(_factorisation(named))
    try:
        return Mesh(tuple(factorisations))
    except LayoutError as error:
        raise CaptureError(f"Megatron's process groups do not lie like axes: {error}") from None


def _axis(state: Any, name: str, getters: Iterable[str]) -> _Axis:
    getter = next((getattr(state, getter) for getter in getters if hasattr(state, getter)), None)
    ranks = dist.get_process_group_ranks(getter()) if getter is not None else [dist.get_rank()]
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(steps) > 1:
        raise CaptureError(f"Megatron's group of axis {name} has ranks {ranks}, which are not evenly spaced.")
    return _Axis(name, len(ranks), steps.pop() if steps else 0)


def _factorisation(axes: Iterable[_Axis]) -> tuple[tuple[str, int], ...]:
    """The axes slowest first. One of a single rank has no stride and may stand anywhere."""
    return tuple((axis.name, axis.size) for axis in sorted(axes, key=lambda axis: -axis.stride))
