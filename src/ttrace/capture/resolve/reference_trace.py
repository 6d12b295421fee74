"""The reference's trace, as twins and candidates read it while they run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.layouts.region import Region, Shape, measure_coverage
from ttrace.trace.format import Operation, Record
from ttrace.trace.reader import Shard, Trace
from ttrace.trace.store import Place
from ttrace.values.generate import Distribution


class ReferenceTrace:
    """The reference's record of each id: its shape, its values, and the distribution it was generated from."""

    def __init__(self, folder: Place | None) -> None:
        self._folder = folder

    def record(self, tensor_id: TensorId) -> Record | None:
        return self._records.get(tensor_id)

    @cached_property
    def has_sketches(self) -> bool:
        """Whether there is anything that is not recorded in full."""
        return self._trace is not None and self._trace.has_sketches

    def distribution(self, tensor_id: TensorId) -> Distribution | None:
        record = self.record(tensor_id)
        return record.values if record else None

    def shape(self, tensor_id: TensorId) -> Shape | None:
        record = self.record(tensor_id)
        return record.region.shape if record and record.region else None

    def tensor(self, tensor_id: TensorId) -> torch.Tensor | None:
        """Return the whole tensor that the reference recorded, to replay it; None if its parts do not cover it."""
        regions = self._group_by_region(tensor_id)
        if not regions or measure_coverage(regions).num_gap:
            return None
        first = next(iter(regions.values()))[0].record
        assert first.region is not None
        full = torch.empty(first.region.shape, dtype=first.dtype, device="cpu")
        for region, summands in regions.items():
            region.put(_add_up([shard.tensor() for shard in summands]), full)
        return full

    def moments(self, tensor_id: TensorId) -> tuple[float, float] | None:
        """Return the mean and the root mean square of the reference's tensor; None if it is zero or not finite."""
        regions = self._group_by_region(tensor_id)
        if not regions:
            return None
        if any(shard.record.sketch is None for summands in regions.values() for shard in summands):
            full = self.tensor(tensor_id)
            if full is None:
                return None
            data = full.to(torch.float64)
            mean, square = float(data.mean()), float(data.square().mean())
        else:
            count = sum(region.numel for region in regions)
            mean = sum(region.numel * _sum_of_means(summands) for region, summands in regions.items()) / count
            sketches = (_add_up([shard.read_stored() for shard in summands]) for summands in regions.values())
            square = float(sum(sketch.square().sum() for sketch in sketches)) / count
        return (mean, math.sqrt(square)) if square > 0.0 and math.isfinite(square) else None

    def _group_by_region(self, tensor_id: TensorId) -> dict[Region, list[Shard]]:
        """Group the shards by region: the shards of a region must be added up. Only the first of replicas is kept."""
        shards: dict[Region, dict[tuple[int, ...], Shard]] = {}
        for shard in self._trace.shards.get(tensor_id, []) if self._trace else []:
            record = shard.record
            if record.region is not None:
                where = {**shard.coord, MICROBATCH_AXIS: record.microbatch}
                shards.setdefault(record.region, {}).setdefault(tuple(where[axis] for axis in record.pending), shard)
        return {region: list(own.values()) for region, own in shards.items()}

    @cached_property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """By module, the operations that its own code called, where they were recorded."""
        return self._trace.operations if self._trace else {}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The reference's other names of tied weights."""
        return self._trace.aliases if self._trace else {}

    @cached_property
    def _trace(self) -> Trace | None:
        return Trace(self._folder) if self._folder else None

    @cached_property
    def _records(self) -> dict[TensorId, Record]:
        shards = self._trace.shards if self._trace else {}
        return {tensor_id: first[0].record for tensor_id, first in shards.items()}


def _add_up(summands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in the dtype of its summands."""
    if len(summands) == 1:
        return summands[0]
    return torch.stack([summand.to(torch.float64) for summand in summands]).sum(0).to(summands[0].dtype)


def _sum_of_means(summands: Iterable[Shard]) -> float:
    return sum(shard.record.sketch.mean for shard in summands if shard.record.sketch is not None)
