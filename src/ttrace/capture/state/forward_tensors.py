"""Tensors of modules in an iteration without a backward pass, such as generation with a cache of keys and values.

Generation calls a model for a prompt, or for parts of it, and then for each token. What enters and leaves a module in
these calls are parts of one sequence: they are put together, and compared with what one call for all of it has.
"""

from __future__ import annotations

from typing import Any

import torch

from ttrace.capture.observe.events import ModuleCall
from ttrace.capture.probes.module_tensors import ModuleTensors
from ttrace.capture.probes.probe import Probe, Visit
from ttrace.layouts.ids import Kind, Site, TensorId

_SEQUENCE = 1
"""The dim of the sequence, behind that of samples."""


class ForwardTensors(ModuleTensors):
    """Collector of what enters and leaves modules until the step ends; masks and caches have more dims."""

    def __init__(self, *args: Any, nudge: Probe | None) -> None:
        """Take the arguments of its base class, and what nudges a twin."""
        super().__init__(*args)
        self._nudge = nudge
        self._parts: dict[tuple[int, Site], list[torch.Tensor]] = {}

    def visit(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep one part of a sequence; in a twin, nudge what comes out of an embedding."""
        if kind not in (Kind.INPUT, Kind.OUTPUT) or not tensor.is_floating_point() or tensor.ndim not in (2, 3):
            return None
        site = Site(call.name, kind, slot)
        other = None
        if self._nudge is not None and kind is Kind.OUTPUT and not call.takes_floats:
            other = self._nudge.visit(Visit(TensorId(call.step, 0, site), tensor, None, entry=True))
        self._parts.setdefault((call.step, site), []).append((tensor if other is None else other).detach().clone())
        return other

    def flush(self) -> None:
        """Show every sequence that is complete now."""
        joined = {
            TensorId(step, 0, site): torch.cat(parts, _SEQUENCE)
            for (step, site), parts in self._parts.items()
            if len({(part.shape[0], *part.shape[_SEQUENCE + 1 :]) for part in parts}) == 1
        }
        self._parts.clear()
        known = {
            tensor_id: self._reference.shape(tensor_id) or tuple(tensor.shape) for tensor_id, tensor in joined.items()
        }
        is_as_long = any(tuple(tensor.shape) == known[tensor_id] for tensor_id, tensor in list(joined.items())[:1])
        for tensor_id, tensor in joined.items():
            # Each chunk of a prompt has the logits of its last token, of which only those of the last chunk are used.
            if is_as_long and len(known[tensor_id]) == tensor.ndim:
                tensor = tensor[:, -known[tensor_id][_SEQUENCE] :]
            self._dispatcher.visit(tensor_id, tensor)
