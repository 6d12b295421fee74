"""This module measures the twins against the reference: the raw material of every tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ttrace.errors import SketchError
from ttrace.judge import scale
from ttrace.judge.logical import Logical, measured
from ttrace.judge.lost import Masks, is_of_update, lost_elements, swayed_norm
from ttrace.judge.scale import with_scale
from ttrace.judge.siblings import with_siblings
from ttrace.judge.tolerance import MARGIN, Sample, tolerances, unit
from ttrace.judge.verdict import Tolerance
from ttrace.tensors.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.sketch import uncertainty
from ttrace.values.stats import Stats

_NUM_SIGMAS = 4.0
"""By how many of a sketch's own errors its twins' are widened."""
_BIGGEST = 6.0
"""How much larger than most the largest element of a parameter is taken to be, where only a sketch is known."""


@dataclass
class Twins:
    """What rounding explains in a reference, by id."""

    reference: Trace
    twins: Sequence[Trace]
    margin: float = MARGIN
    tolerances: dict[TensorId, Tolerance] = field(init=False)
    stats: dict[TensorId, tuple[Stats, ...]] = field(init=False, default_factory=dict)
    """Each twin against the reference, by id."""
    _noise: dict[TensorId, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        samples = [sample for tensor_id in self.reference.shards if (sample := self._sample(tensor_id)) is not None]
        found = with_siblings(tolerances(samples, margin=self.margin), self.stats, margin=self.margin)
        self.tolerances = with_scale(found, self.stats, margin=self.scale_margin)

    @property
    def scale_margin(self) -> float:
        """The margin of scales: whoever widens one margin widens both."""
        return scale.MARGIN * self.margin / MARGIN

    def lost(self, tensor_id: TensorId) -> Masks:
        """The elements to leave out of a comparison of this id; none where only sketches are known."""
        try:
            return lost_elements(self.reference, self.twins, tensor_id, self._noise)
        except SketchError:
            return {}

    def _sample(self, tensor_id: TensorId) -> Sample | None:
        logical = Logical.found(self.reference, tensor_id)
        if logical is None:
            return None
        lost, found = self.lost(tensor_id), []
        for twin in self.twins:
            other = Logical.found(twin, tensor_id, logical.shape)
            if other is not None and other.shape == logical.shape:
                found.append(measured(logical, other, lost=lost)[0])
        self.stats[tensor_id] = tuple(found)
        wider = 1.0 + _NUM_SIGMAS * uncertainty(logical.num_buckets) if logical.num_buckets else 1.0
        errors = [stats.error * wider for stats in found]
        dtype = self.reference.shards[tensor_id][0].record.dtype
        if tensor_id.kind is Kind.PARAM_GRAD:
            self._noise[tensor_id] = self.margin * max([*errors, unit(dtype)])
        follows_update = is_of_update(tensor_id) or (tensor_id.kind is Kind.PARAM and tensor_id.step > 0)
        floor = self._update_floor(tensor_id, logical) if follows_update else 0.0
        return Sample(tensor_id, math.prod(logical.shape), dtype, tuple(errors), floor)

    def _update_floor(self, tensor_id: TensorId, logical: Logical) -> float:
        """What single elements may do to a step: three twins may happen to show nothing of it."""
        norm = measured(logical, logical)[0].norm
        if logical.num_buckets:
            return self._turned(tensor_id, norm)
        if tensor_id.kind is Kind.PARAM:
            return 0.0
        noise = self._noise.get(tensor_id.at(Kind.PARAM_GRAD, slot=""), 0.0)
        swayed = swayed_norm(self.reference, tensor_id, noise / self.margin) / norm if norm and noise else 0.0
        return max(swayed, self._quantum(tensor_id, logical) if tensor_id.kind is Kind.UPDATE else 0.0)

    def _turned(self, tensor_id: TensorId, norm: float) -> float:
        """What one element does whose update turns around, or is rounded the other way: sketches leave none out."""
        step = tensor_id.step - (tensor_id.kind is Kind.PARAM)
        update = Logical.found(self.reference, replace(tensor_id.at(Kind.UPDATE, slot=""), step=step))
        if update is None or not norm:
            return 0.0
        after = Logical.found(self.reference, replace(tensor_id.at(Kind.PARAM_AFTER, slot=""), step=step))
        quantum = unit(after.dtype) * _BIGGEST * measured(after, after)[0].norm if after is not None else 0.0
        turned = max(measured(update, update)[0].norm, quantum)
        return 2.0 * turned / math.sqrt(math.prod(update.shape)) / norm

    def _quantum(self, tensor_id: TensorId, update: Logical) -> float:
        """What one element that is rounded the other way does to an update: the twins may happen to have none."""
        after = Logical.found(self.reference, tensor_id.at(Kind.PARAM_AFTER))
        if after is None:
            return 0.0
        biggest = max((float(piece.tensor().abs().max()) for piece in after.pieces if piece.region.numel), default=0.0)
        norm = measured(update, update)[0].norm
        dtype = self.reference.shards[tensor_id][0].record.dtype
        return 2 * unit(dtype) * biggest / norm if norm else 0.0
