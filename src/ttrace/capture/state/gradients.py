"""Gradients of streamed parameters, taken as soon as they are complete, and dropped."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ttrace.compat.torch import read_sparse_rows
from ttrace.large_references.parameter_source import ParameterSource, find_source
from ttrace.layouts.region import Region
from ttrace.reference.split_leaves import sum_rows
from ttrace.tensors import ranges as rg
from ttrace.tensors.ranges import Ranges

Deliver = Callable[[str, "torch.Tensor | None", "Region | None"], None]
"""Called with a parameter's name and its gradient; with a region, the gradient is of that part. None stands for a
gradient that is zero because no token reached the part."""


class StreamedGradients:
    """Collector of the gradients of streamed parameters, leaf by leaf, until `remove`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], deliver: Deliver, keep: Callable[[str], None]) -> None:
        found = {name: find_source(parameter) for name, parameter in parameters.items()}
        self._sources: dict[str, ParameterSource] = {
            name: source for name, source in found.items() if source is not None
        }
        self._deliver = deliver
        self._keep = keep
        self.begin()
        for name, source in self._sources.items():
            source.on_gradient = partial(self._on_gradient, name)

    def __bool__(self) -> bool:
        """Whether anything is streamed."""
        return bool(self._sources)

    def begin(self) -> None:
        """Begin a step."""
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: dict[str, list[tuple[int, int]]] = {}

    def flush(self) -> None:
        """Deliver what waits, and the rows that no token reached, once every microbatch is finished."""
        for (name, start), gradient in tuple(self._waiting.items()):
            self._complete(name, start, gradient)
        self._waiting.clear()
        for name, rows in self._rows.items():
            shape = self._sources[name].shape
            if rest := _find_other_rows(rg.merge(sorted(rows)), shape[0]):
                self._deliver(name, None, _region_of_rows(shape, rest))

    def remove(self) -> None:
        for source in self._sources.values():
            source.on_gradient = None

    def _on_gradient(self, name: str, leaf: torch.Tensor, start: int) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "the hook runs when a gradient was added"
        num_expected, key = self._sources[name].num_microbatches, (name, start)
        self._counts[key] += 1
        if self._counts[key] > num_expected:
            self._keep(
                f"{name}: its gradient grew after {num_expected} backward passes, when it had been recorded. Say "
                "ttrace.streamed(num_microbatches=...), and checkpoint with use_reentrant=False."
            )
            return
        before = self._waiting.pop(key, None)
        total = gradient if before is None else _add(before, gradient)
        if self._counts[key] == num_expected:
            self._complete(name, start, total)
        else:
            self._waiting[key] = _move_to_disk(total) if before is None else total

    def _complete(self, name: str, start: int, gradient: torch.Tensor) -> None:
        shape = self._sources[name].shape
        if gradient.is_sparse:
            index, values = read_sparse_rows(gradient)
            rows = rg.from_indices(index)
        elif gradient.numel() == self._sources[name].numel:
            self._deliver(name, gradient.view(shape), None)
            return
        else:
            rows, values = ((start, start + gradient.shape[0]),), gradient
        if rows:
            self._deliver(name, values, _region_of_rows(shape, rows))
        self._rows.setdefault(name, []).extend(rows)


def _add(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Add in the order and with the rounding of an ordinary run, which adds dense gradients."""
    if total.is_sparse and gradient.is_sparse:
        index, rows = (
            torch.cat(parts) for parts in zip(read_sparse_rows(total), read_sparse_rows(gradient), strict=True)
        )
        return sum_rows(index, rows, total.shape)
    return gradient + total if total.is_sparse else total.add_(gradient)


def _region_of_rows(shape: tuple[int, ...], rows: Ranges) -> Region:
    return Region(shape, (rows, *map(rg.whole, shape[1:])))


def _find_other_rows(rows: Ranges, num: int) -> Ranges:
    """Find the rows that are not among these."""
    stops = [0, *(stop for _, stop in rows)]
    starts = [*(start for start, _ in rows), num]
    return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


def _move_to_disk(gradient: torch.Tensor) -> torch.Tensor:
    """Copy the values to a file without a name, which is deleted together with the tensor."""
    if gradient.device.type != "cpu" or gradient.is_sparse:
        return gradient
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient"
        mapped = torch.from_file(str(path), shared=True, size=gradient.numel(), dtype=gradient.dtype, device="cpu")
    return mapped.view(gradient.shape).copy_(gradient)
