"""Gradients of streamed parameters, taken as soon as they are complete, and dropped."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ttrace.reference.parameter_source import Maker, maker_of
from ttrace.reference.split_leaves import summed_rows
from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges
from ttrace.tensors.region import Region
from ttrace.torch_compat import read_sparse_rows

Deliver = Callable[[str, "torch.Tensor | None", "Region | None"], None]
"""Told a parameter's name and its gradient; with a region, of that part of it. None is a part that nothing reached."""


class StreamedGradients:
    """Listens to the leaves that streamed parameters are used as, until `remove`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], deliver: Deliver, keep: Callable[[str], None]) -> None:
        found = {name: maker_of(parameter) for name, parameter in parameters.items()}
        self._makers: dict[str, Maker] = {name: maker for name, maker in found.items() if maker is not None}
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

    def flush(self) -> None:
        """Every microbatch is through: deliver what waits, and what no token reached."""
        for (name, start), gradient in tuple(self._waiting.items()):
            self._complete(name, start, gradient)
        self._waiting.clear()
        for name, rows in self._rows.items():
            shape = self._makers[name].shape
            if rest := _others(rg.merge(sorted(rows)), shape[0]):
                self._deliver(name, None, _region(shape, rest))

    def remove(self) -> None:
        for maker in self._makers.values():
            maker.arrived = None

    def _arrived(self, name: str, leaf: torch.Tensor, start: int) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "it has just come"
        num_expected, key = self._makers[name].num_microbatches, (name, start)
        self._counts[key] += 1
        if self._counts[key] > num_expected:
            self._keep(
                f"{name}: its gradient grew after {num_expected} backward passes, when it had been recorded. Say "
                "ttrace.streamed(num_microbatches=...), and checkpoint with use_reentrant=False."
            )
            return
        before = self._waiting.pop(key, None)
        total = gradient if before is None else _added(before, gradient)
        if self._counts[key] == num_expected:
            self._complete(name, start, total)
        else:
            self._waiting[key] = _on_disk(total) if before is None else total

    def _complete(self, name: str, start: int, gradient: torch.Tensor) -> None:
        shape = self._makers[name].shape
        if gradient.is_sparse:
            index, values = read_sparse_rows(gradient)
            rows = rg.from_indices(index)
        elif gradient.numel() == self._makers[name].numel:
            self._deliver(name, gradient.view(shape), None)
            return
        else:
            rows, values = ((start, start + gradient.shape[0]),), gradient
        if rows:
            self._deliver(name, values, _region(shape, rows))
        self._rows.setdefault(name, []).extend(rows)


def _added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """In the order and with the roundings of an ordinary run, which adds dense gradients."""
    if total.is_sparse and gradient.is_sparse:
        index, rows = (
            torch.cat(parts) for parts in zip(read_sparse_rows(total), read_sparse_rows(gradient), strict=True)
        )
        return summed_rows(index, rows, total.shape)
    return gradient + total if total.is_sparse else total.add_(gradient)


def _region(shape: tuple[int, ...], rows: Ranges) -> Region:
    return Region(shape, (rows, *map(rg.whole, shape[1:])))


def _others(rows: Ranges, num: int) -> Ranges:
    """The rows that are not among these."""
    stops = [0, *(stop for _, stop in rows)]
    starts = [*(start for start, _ in rows), num]
    return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


def _on_disk(gradient: torch.Tensor) -> torch.Tensor:
    """The same values in a file without a name, which goes when the tensor does."""
    if gradient.device.type != "cpu" or gradient.is_sparse:
        return gradient
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient"
        kept = torch.from_file(str(path), shared=True, size=gradient.numel(), dtype=gradient.dtype)
    return kept.view(gradient.shape).copy_(gradient)
