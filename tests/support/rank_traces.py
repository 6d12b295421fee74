"""Traces of one rank, with a few tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Manifest, Record
from ttrace.trace.writer import Writer
from ttrace.values.generate import Normal, generate_values


def manifest(rank: int = 0, num_ranks: int = 1, *, mesh: str = "") -> Manifest:
    return Manifest(role="candidate", rank=rank, num_ranks=num_ranks, mesh=mesh, seed=0)


def tensor_id(name: str = "layer", microbatch: int | None = 0) -> TensorId:
    return TensorId.of(0, microbatch, name, Kind.OUTPUT)


def record_of(name: str, tensor: torch.Tensor, region: Region | None = None, **more: object) -> Record:
    """Make the record that a recorder would make of this tensor; `region` is None for the whole."""
    shape = tuple(tensor.shape)
    return Record(tensor_id(name), shape, tensor.dtype, region or Region.whole(shape), **more)  # type: ignore[arg-type]  # fields of Record


def normal(name: str, region: Region, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return generate_values(tensor_id(name), region, dtype=dtype, distribution=Normal())


def write_trace(folder: Path, tensors: dict[str, torch.Tensor], **options: int) -> Path:
    """Write one rank's finished trace, and return its folder."""
    writer = Writer(folder, manifest(), **options)  # type: ignore[arg-type]  # limits, never the claim
    for name, tensor in tensors.items():
        writer.write(record_of(name, tensor), tensor)
    writer.close(End(num_steps=1))
    return writer.folder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal down to the sign of zero and the bits of nan, in every dtype."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # A flat copy, because only that can be viewed as bytes whatever the shape.
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(left, right)
