"""Place where gradients enter the model: at its logits, as a rule.

Twins must be nudged there too. What a loss hands back hardly changes where a label is, and there it is largest: the
sums over a vocabulary that follow would be rounded alike in all twins, and otherwise in a candidate that sums in parts
(tests/capture/observe/test_gradient_entry.py). Numbers of 16 bits are summed in float32, so the rounding of sums does
not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ttrace.capture.observe.events import ModuleCall
from ttrace.layouts.ids import Kind

_MANY = 16
"""A gradient with at least this many elements is not that of a loss."""


@dataclass
class _BackwardPass:
    """The state of one microbatch's backward pass."""

    seen: set[torch.Size] = field(default_factory=set)
    calls: list[ModuleCall] = field(default_factory=list)
    """The calls at whose outputs gradients entered."""
    is_inside: bool = False
    """Whether the backward pass of one of them is finished."""


class GradientEntry:
    """Detector of the place where gradients enter a twin's model."""

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], _BackwardPass] = {}

    def is_at(self, call: ModuleCall, kind: Kind, gradient: torch.Tensor) -> bool:
        """Whether gradients enter the model here; a gradient that a module shares with its last child counts once."""
        if not kind.is_activation_grad or gradient.layout is not torch.strided or gradient.numel() < _MANY:
            return False
        now = self._passes.setdefault((call.step, call.microbatch), _BackwardPass())
        if now.is_inside:
            return False
        if kind is Kind.GRAD_INPUT:
            now.is_inside = any(call is entered for entered in now.calls)
            return False
        now.calls.append(call)
        is_new = gradient.shape not in now.seen
        now.seen.add(gradient.shape)
        return is_new and gradient.dtype.itemsize >= torch.float32.itemsize
