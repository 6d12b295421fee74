"""Gradients that each microbatch adds to a parameter.

Tensor hooks on the parameters insert no node into the graph, and fire under every pipeline schedule. They never fire
for parameters that FSDP2 shards: it reduces gradients as soon as they are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

Deliver = Callable[[str, int, torch.Tensor], None]
"""Called with a parameter's name, the microbatch, and all that the microbatch added to the gradient."""


class MicrobatchGradients:
    """Sums of each parameter's gradient within a microbatch, until `remove`: several backward passes may add to one."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], microbatch: Callable[[], int | None], deliver: Deliver
    ) -> None:
        self._microbatch = microbatch
        self._deliver = deliver
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, torch.Tensor]] = {}
        trained = [(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad]
        self._unseen = dict(trained)
        self._handles = [parameter.register_hook(partial(self._add, name)) for name, parameter in trained]

    def flush(self) -> None:
        """Deliver the sums that are left, once every microbatch is finished."""
        with self._lock:
            totals, self._totals = self._totals, {}
        for name, (microbatch, total) in totals.items():
            self._deliver(name, microbatch, total)

    def notes(self) -> list[str]:
        """Return a note about parameters with a gradient to which no microbatch was seen to add, if any."""
        unseen = [name for name, parameter in self._unseen.items() if parameter.grad is not None]
        if not unseen:
            return []
        return [f"{len(unseen)} parameters have no gradients of single microbatches, the first is {unseen[0]}"]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        microbatch = self._microbatch()
        if microbatch is None:
            return
        with self._lock:
            self._unseen.pop(name, None)
            number, total = self._totals.get(name, (microbatch, None))
            if total is None or number != microbatch:
                # A copy, because torch goes on to accumulate into this memory.
                self._totals[name] = microbatch, gradient.detach().clone()
            else:
                self._totals[name] = microbatch, total + gradient.detach()
        if total is not None and number != microbatch:
            self._deliver(name, number, total)
