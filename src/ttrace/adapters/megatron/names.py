"""Names, mesh and stated layouts of a Megatron job.

Names have the layer and expert numbers of the whole model. The mesh is read from Megatron's process groups: dense
modules see the ranks as pp x dp x cp x tp, experts as pp x edp x ep x tp, two factorisations of the same ranks. The
tensor parallelism of experts is called `etp` if it differs from that of dense modules.

`find_disagreements` compares our layouts of parameters with those of Megatron's checkpoints. Layouts are not taken from
`sharded_state_dict`, because it is the candidate's own code. But if it states a different layout, one of the two is
wrong, and the user must know this before tensors are compared.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.wrappers import find_canonical_name, find_wrapper_levels
from ttrace.errors import CaptureError, LayoutError
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import ROOT, encode_name
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region

TIED = ("output_layer.weight", "embedding.word_embeddings.weight")
"""The last stage's copy of a tied embedding, and the embedding itself."""

_GROUPED = re.compile(r"(?P<module>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>\d+)")
"""Weights of a grouped module that has one numbered weight for each expert."""
_DENSE = {
    "tp": ("get_tensor_model_parallel_group",),
    "cp": ("get_context_parallel_group",),
    "dp": ("get_data_parallel_group",),
    "pp": ("get_pipeline_model_parallel_group",),
}
"""For each axis, the functions that return its group; newer names come first."""
_EXPERT = {
    "etp": ("get_expert_tensor_parallel_group", "get_tensor_model_parallel_group"),
    "ep": ("get_expert_model_parallel_group",),
    "edp": ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group"),
    "pp": ("get_pipeline_model_parallel_group",),
}


class ChunkNames:
    """The canonical names of one chunk."""

    def __init__(self, chunk: nn.Module, expert_rank: int) -> None:
        self._chunk = chunk
        self._expert_rank = expert_rank
        self._numbers = dict(_number_members(chunk, expert_rank))
        self._num_local = {
            find_canonical_name(p, chunk): m.num_local_experts for p, m in chunk.named_modules() if _has_experts(m)
        }
        self._copies_embedding = any(map(_copies_embedding, chunk.modules()))
        self.divided = frozenset(
            {
                ROOT,
                *(
                    find_canonical_name(path.rpartition(".layers.")[0], chunk)
                    for path in self._numbers
                    if ".layers." in path
                ),
            }
        )
        """The modules that are divided over stages: those that contain the layers."""

    def name(self, path: str) -> str:
        parts, wrappers = path.split("."), find_wrapper_levels(path, self._chunk)
        numbered = (self._numbers.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts))
        name = encode_name(".".join(part for i, part in enumerate(numbered) if i not in wrappers)) or ROOT
        if self._copies_embedding and name == TIED[0]:
            return TIED[1]
        match = _GROUPED.fullmatch(name)
        if match:
            experts = match["module"].rpartition(".experts.")[0] + ".experts"
            return f"{match['module']}{int(match['number']) + self._expert_rank * self._num_local.get(experts, 0)}"
        return name


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
        raise CaptureError(f"Megatron's process groups do not form a mesh: {error}") from None


def read_checkpoint(model: Any) -> dict[str, Any]:
    """Read the entries of this chunk's checkpoint by path; old versions may not have one."""
    if not hasattr(model, "sharded_state_dict"):
        return {}
    # Otherwise all layers are stacked into one tensor.
    checkpoint: dict[str, Any] = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return checkpoint


def find_disagreements(model: Any, checkpoint: Mapping[str, Any], regions: Mapping[str, Region]) -> Iterator[str]:
    """Describe each parameter whose checkpoint states a different layout; `regions` has those of the layout by path."""
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    for path, entry in checkpoint.items():
        parameter, region = parameters.get(path), regions.get(path)
        if parameter is None or region is None:
            continue
        for shard in _list_shards(entry):
            theirs = _find_box(shard)
            ours = _find_own_box(region, parameter, shard)
            shape = tuple(shard.global_shape[shard.prepend_axis_num :])
            if (ours, region.shape) != (theirs, shape):
                yield (
                    f"{path}: according to sharded_state_dict this rank holds {_format_box(theirs)} of {shape}, "
                    f"according to the layout {_format_box(ours)} of {region.shape}. One of them is wrong."
                )
                break


def _number_members(chunk: nn.Module, expert_rank: int) -> Iterator[tuple[str, str]]:
    """Yield each layer and expert of this chunk by path, with its number in the whole model."""
    for path, module in chunk.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            for i, layer in enumerate(module.layers):
                number = getattr(layer, "layer_number", None)
                if isinstance(number, int):
                    yield f"{path}.layers.{i}", str(number - 1)
        if isinstance(getattr(module, "local_experts", None), nn.ModuleList):
            first = expert_rank * len(module.local_experts)
            for i in range(len(module.local_experts)):
                yield f"{path}.local_experts.{i}", str(first + i)


def _copies_embedding(module: nn.Module) -> bool:
    """Return whether this is the last stage of a model and shares the embedding of the first stage."""
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    return bool(is_tied and getattr(module, "post_process", False) and not getattr(module, "pre_process", True))


def _has_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "num_local_experts", None), int)


@dataclass(frozen=True)
class _Axis:
    name: str
    size: int
    stride: int


def _read_axis(state: Any, name: str, getters: Iterable[str]) -> _Axis:
    getter = next((getattr(state, getter) for getter in getters if hasattr(state, getter)), None)
    ranks = dist.get_process_group_ranks(getter()) if getter is not None else [dist.get_rank()]
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(steps) > 1:
        raise CaptureError(f"Megatron's group of axis {name} has ranks {ranks}, which are not evenly spaced.")
    return _Axis(name, len(ranks), steps.pop() if steps else 0)


def _sort_axes(axes: Iterable[_Axis]) -> tuple[tuple[str, int], ...]:
    """Sort the axes, slowest first. An axis of a single rank has no stride, and its position does not matter."""
    return tuple((axis.name, axis.size) for axis in sorted(axes, key=lambda axis: -axis.stride))


def _list_shards(entry: Any) -> list[Any]:
    """List the shards of one entry: a part that is not contiguous in the whole is saved as several shards."""
    built = entry.build() if hasattr(entry, "build") else entry
    parts = built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]
    return [part for part in parts if isinstance(getattr(part, "data", None), torch.Tensor)]


def _find_box(shard: Any) -> tuple[Ranges, ...]:
    offsets = shard.global_offset[shard.prepend_axis_num :]
    return tuple(((at, at + size),) for at, size in zip(offsets, shard.local_shape, strict=True))


def _find_own_box(region: Region, parameter: nn.Parameter, shard: Any) -> tuple[Ranges, ...]:
    """Find the indices of a shard according to our layout; a shard is a run of rows of the parameter."""
    row = max(parameter[0].numel(), 1)
    first = (shard.data.storage_offset() - parameter.storage_offset()) // row
    rows = rg.select(region.dims[0], ((first, first + shard.local_shape[0]),))
    return (rg.merge(rows), *(rg.merge(ranges) for ranges in region.dims[1:]))


def _format_box(box: tuple[Ranges, ...]) -> str:
    ends = tuple(max((stop for _, stop in ranges), default=0) for ranges in box)
    return str(Region(ends, box))
