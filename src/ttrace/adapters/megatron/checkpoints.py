"""Comparison of our layouts of parameters with those that Megatron's own checkpoints state.

`sharded_state_dict` is the candidate's own code, so layouts are not taken from it. But where it states another layout,
one of the two is wrong, and the user must know this before anything is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ttrace.layouts.region import Region, Shape
from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges


def read_checkpoint(model: Any) -> dict[str, Any]:
    """Read what a checkpoint of this chunk would hold, by path; old versions may have none."""
    if not hasattr(model, "sharded_state_dict"):
        return {}
    # Otherwise all layers are one tensor with a dim in front.
    checkpoint: dict[str, Any] = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return checkpoint


def find_disagreements(model: Any, checkpoint: Mapping[str, Any], regions: Mapping[str, Region]) -> Iterator[str]:
    """Describe each parameter of a chunk whose checkpoint states another layout; `regions` are by path in the chunk."""
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
                    f"{path}: sharded_state_dict says that this rank holds {_format_box(theirs)} of {shape}, "
                    f"the layout says {_format_box(ours)} of {region.shape}. One of them is wrong."
                )
                break


def _list_shards(entry: Any) -> list[Any]:
    """List the shards of one entry: a part that is not contiguous in the whole is saved as several shards."""
    built = entry.build() if hasattr(entry, "build") else entry
    parts = built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]
    return [part for part in parts if isinstance(getattr(part, "data", None), torch.Tensor)]


def _find_box(shard: Any) -> tuple[Ranges, ...]:
    offsets = shard.global_offset[shard.prepend_axis_num :]
    return tuple(((at, at + size),) for at, size in zip(offsets, shard.local_shape, strict=True))


def _find_own_box(region: Region, parameter: nn.Parameter, shard: Any) -> tuple[Ranges, ...]:
    """Find where the rows of a shard lie according to our layout; a shard is a run of rows of the parameter."""
    row = max(parameter[0].numel(), 1)
    first = (shard.data.storage_offset() - parameter.storage_offset()) // row
    rows = rg.select(region.dims[0], ((first, first + shard.local_shape[0]),))
    return (rg.merge(rows), *(rg.merge(ranges) for ranges in region.dims[1:]))


def _format_box(box: tuple[Ranges, ...]) -> str:
    return str(Region(_find_ends(box), box))


def _find_ends(box: tuple[Ranges, ...]) -> Shape:
    return tuple(max((stop for _, stop in ranges), default=0) for ranges in box)
