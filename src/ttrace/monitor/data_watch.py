"""Data that enter a model, as fingerprints of each step."""

from __future__ import annotations

from typing import Any

import torch

from ttrace.capture.observe.structures import flatten_with_paths
from ttrace.monitor.fingerprint import make_fingerprint, read_fingerprints


class DataWatch:
    """The fingerprints of what entered the model, by step, since they were last read."""

    def __init__(self) -> None:
        self._steps: dict[int, torch.Tensor] = {}
        self._last: tuple[int, int] | None = None

    def on_call(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the data of one call of the model: its integers, as those of words, or else all its numbers."""
        tensors = [leaf for _, leaf in flatten_with_paths((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        words = [each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool]
        for tensor in words or tensors:
            added = make_fingerprint(tensor)
            known = self._steps.get(step)
            self._steps[step] = added if known is None else known * 3 + added

    def read(self) -> tuple[int, list[int]]:
        """Read the fingerprint of the last step, and the steps whose data are those of the step before."""
        steps, values = list(self._steps), read_fingerprints(self._steps.values())
        self._steps.clear()
        repeated = []
        for step, value in zip(steps, values, strict=True):
            if self._last == (step - 1, value):
                repeated.append(step)
            self._last = (step, value)
        return (self._last[1] if self._last is not None else 0), repeated
