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
from ttrace.tensors.ids import Kind

_MANY = 16
"""Numbers from which on a gradient is not that of a loss."""


@dataclass
class _BackwardPass:
    """One microbatch's backward pass, as far as it has come."""

    seen: set[torch.Size] = field(default_factory=set)
    calls: list[ModuleCall] = field(default_factory=list)
    """The calls at whose outputs gradients entered."""
    is_inside: bool = False
    """Whether one of them is through."""


class GradientEntry:
    """Follows the gradients of a twin."""

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], _BackwardPass] = {}

    def is_at(self, call: ModuleCall, kind: Kind, gradient: torch.Tensor) -> bool:
        """Whether gradients enter the model here; what a module's and its last child's output share counts once."""
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
