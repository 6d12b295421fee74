"""This module takes the gradients of streamed parameters as soon as they are complete, and drops them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ttrace.reference.maker import Maker, maker_of
from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges
from ttrace.tensors.region import Region

Deliver = Callable[[str, "torch.Tensor | None", "Region | None"], None]
"""Told a parameter's name and its gradient; with a region, of that part of it. None is a part that nothing reached."""


class Arrivals:
    """Listens to the leaves that streamed parameters are used as, until `remove`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], deliver: Deliver, keep: Callable[[str], None]) -> None:
        found = {name: maker_of(parameter) for name, parameter in parameters.items()}
        self._makers: dict[str, Maker] = {name: maker for name, maker in found.items() if maker is not None}
        self._parameters = parameters
        self._deliver = deliver
        self._keep = keep
        self.begin()
        for name, maker in self._makers.items():
            maker.arrived = partial(self._arrived, name)

    def __bool__(self) -> bool:
        """Whether anything is streamed."""
        return bool(self._makers)

    def begin(self) -> None:
        """A step begins."""
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: dict[str, list[tuple[int, int]]] = {}
        for maker in list(self._makers.values())[:1]:
            maker.progress.begin()

    def flush(self) -> None:
        """Every microbatch is through: deliver what waits, and what no token reached."""
        for (name, start), leaf in tuple(self._waiting.items()):
            self._complete(name, leaf, start)
        for name, rows in self._rows.items():
            shape = self._makers[name].shape
            if rest := _others(rg.merged(sorted(rows)), shape[0]):
                self._deliver(name, None, _region(shape, rest))

    def remove(self) -> None:
        for maker in self._makers.values():
            maker.arrived = None

    def _arrived(self, name: str, leaf: torch.Tensor, start: int) -> None:
        num_expected = self._makers[name].num_microbatches
        self._counts[name, start] += 1
        if self._counts[name, start] == num_expected:
            self._complete(name, leaf, start)
        elif self._counts[name, start] < num_expected:
            self._waiting[name, start] = leaf
            leaf.grad = _on_disk(leaf.grad) if self._counts[name, start] == 1 else leaf.grad
        else:
            leaf.grad = None
            self._keep(
                f"{name}: its gradient grew after {num_expected} backward passes, when it had been recorded. Say "
                "ttrace.streamed(num_microbatches=...), and checkpoint with use_reentrant=False."
            )

    def _complete(self, name: str, leaf: torch.Tensor, start: int) -> None:
        self._waiting.pop((name, start), None)
        gradient, shape = leaf.grad, self._makers[name].shape
        if gradient is None:
            return
        if gradient.is_sparse:
            index, rows = _summed(gradient)
            ranges = rg.from_indices(index)
            self._deliver(name, rows, _region(shape, ranges))
            self._rows.setdefault(name, []).extend(ranges)
        elif leaf is not self._parameters[name]:
            run = start, start + leaf.shape[0]
            self._deliver(name, gradient, _region(shape, (run,)))
            self._rows.setdefault(name, []).append(run)
        else:
            self._deliver(name, gradient, None)
        leaf.grad = None


def _region(shape: tuple[int, ...], rows: Ranges) -> Region:
    return Region(shape, (rows, *map(rg.whole, shape[1:])))


def _others(rows: Ranges, num: int) -> Ranges:
    """The rows that are not among these."""
    stops = [0, *(stop for _, stop in rows)]
    starts = [*(start for start, _ in rows), num]
    return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


def _summed(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a sparse gradient has, each once. Added in the order of the tokens, as the dense gradient is."""
    index, inverse = gradient._indices()[0].unique(return_inverse=True)
    rows = gradient._values().new_zeros((index.numel(), *gradient.shape[1:]))
    return index, rows.index_add_(0, inverse, gradient._values())


def _on_disk(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The same values in a file without a name, which goes when the tensor does; later passes add to it in place."""
    if gradient is None or gradient.device.type != "cpu" or gradient.layout is not torch.strided:
        return gradient
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient"
        kept = torch.from_file(str(path), shared=True, size=gradient.numel(), dtype=gradient.dtype)
    return kept.view(gradient.shape).copy_(gradient)
