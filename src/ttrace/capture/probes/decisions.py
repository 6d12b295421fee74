"""Replay of discrete decisions: where numbers decide, as in a router's top-k, rounding may change the decision.

One token that goes to another expert changes everything after it, and by right. So twins and candidates choose as the
reference did, while what they would have chosen themselves is recorded, with the scores it was chosen by.
"""

from __future__ import annotations

import torch

from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.layouts.ids import TensorId
from ttrace.layouts.placement import Placement

_AGREEMENT = 0.5
"""If own choices and the reference's agree in a smaller share of rows, they are of other rows: rounding changes few."""


class Decisions:
    """The reference's choices, for this rank's rows."""

    def __init__(self, resolver: LayoutResolver, reference: ReferenceTrace) -> None:
        self._resolver = resolver
        self._reference = reference

    def replay(self, tensor_id: TensorId, own: torch.Tensor, placement: Placement | None) -> torch.Tensor | None:
        """Return what the reference chose here, or the own choice if its choices are of other rows.

        None if the reference's choice is unknown.
        """
        full = self._reference.tensor(tensor_id)
        placement = placement or self._resolver.infer(tensor_id, own)
        if full is None or placement is None:
            return None
        region = placement.region
        if region.shape != tuple(full.shape) or region.local_shape != tuple(own.shape):
            return None
        chosen = region.take(full).to(own.device, own.dtype, non_blocking=True)
        same = (chosen.sort(-1).values == own.sort(-1).values).all(-1) if own.ndim else chosen == own
        return torch.where(same.to(torch.float32).mean() >= _AGREEMENT, chosen, own)
