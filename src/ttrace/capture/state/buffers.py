"""Buffers of a model, and which of them forward passes change.

A buffer may be another tensor after each forward pass, so buffers are asked for again whenever they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ttrace.capture.probes.distributions import read_numbers


class Buffers:
    """The buffers of a model. The reference finds out which of them the first forward pass of a step changes.

    Statistics like those of a batch norm depend on which microbatches a rank has run; buffers that an optimizer's step
    changes, like the bias that balances experts, do not.
    """

    def __init__(self, read: Callable[[], Mapping[str, torch.Tensor]], *, is_reference: bool) -> None:
        self.read = read
        read()  # refuse names that collide now, and not in the middle of a step
        self._is_reference = is_reference
        self._before: Mapping[str, torch.Tensor] = {}
        self._changed: dict[str, None] = {}
        self._is_same: list[tuple[str, torch.Tensor]] = []
        """Comparisons whose results nobody has read from the device yet."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The buffers that forward passes change."""
        results = read_numbers(result for _, result in self._is_same)
        self._changed |= {name: None for (name, _), is_same in zip(self._is_same, results, strict=True) if not is_same}
        self._is_same.clear()
        return tuple(self._changed)

    def on_start(self) -> None:
        """Begin a step."""
        if self._is_reference:
            self._before = {name: buffer.detach().clone() for name, buffer in self.read().items()}

    def on_backward(self) -> None:
        """Compare the buffers after the first forward pass of the step."""
        now = self.read() if self._before else {}
        for name, before in self._before.items():
            after = now.get(name)
            if after is not None and after.shape == before.shape and after.dtype == before.dtype:
                self._is_same.append((name, (before == after).all()))
            else:
                self._changed[name] = None
        self._before = {}
