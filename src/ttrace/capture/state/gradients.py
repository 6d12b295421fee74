"""Gradients that are gone before the step ends: of streamed parameters, and of single microbatches.

The gradient of a streamed parameter is taken as soon as it is complete, and then dropped (`StreamedGradients`). The
gradient of a single microbatch is taken before the next one is added to it (`MicrobatchGradients`). `Streaming` states
what cannot be traced of a streamed model.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter
from ttrace.capture.probes.generator import read_numbers
from ttrace.compat.torch import read_sparse_rows
from ttrace.large_references.parameter_source import ParameterSource, find_source
from ttrace.large_references.streamed_tensor import sum_rows
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import Kind
from ttrace.layouts.ranges import Ranges
from ttrace.layouts.region import Region

Deliver = Callable[[str, "torch.Tensor | None", "Region | None"], None]
"""Called with a parameter's name and its gradient. If there is a region, the gradient is of that part only. None stands
for a gradient of zeros, because no token reached the part."""


class StreamedGradients:
    """Collector of the gradients of streamed parameters, leaf by leaf, until `remove`."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], deliver: Deliver, add_problem: Callable[[str], None]
    ) -> None:
        found = {name: find_source(parameter) for name, parameter in parameters.items()}
        self._sources: dict[str, ParameterSource] = {
            name: source for name, source in found.items() if source is not None
        }
        self._deliver = deliver
        self._add_problem = add_problem
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
        """After the last microbatch, deliver gradients that still wait, and the rows that no token reached."""
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
            self._add_problem(
                f"{name}: its gradient grew after {num_expected} backward passes, when it had been recorded. Set "
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


DeliverMicrobatch = Callable[[str, int, torch.Tensor], None]
"""Called with a parameter's name, the microbatch, and all that the microbatch added to the gradient."""


class MicrobatchGradients:
    """Collector of what each microbatch adds to a parameter's gradient, until `remove`.

    Several backward passes of a microbatch may add to one gradient, so their sum is collected. Tensor hooks on the
    parameters insert no node into the graph, and fire under every pipeline schedule. They never fire for parameters
    that FSDP2 shards: it reduces gradients as soon as they exist.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], microbatch: Callable[[], int | None], deliver: DeliverMicrobatch
    ) -> None:
        self._microbatch = microbatch
        self._deliver = deliver
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, torch.Tensor]] = {}
        trained = [(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad]
        self._unseen = dict(trained)
        self._handles = [parameter.register_hook(partial(self._add, name)) for name, parameter in trained]

    def flush(self) -> None:
        """Deliver the sums of the last microbatch."""
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


class StaleGradients:
    """Observer of gradients that are not zero when the first backward pass of a step begins.

    A script that accumulates over microbatches within a step does not have such gradients.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], adapter: Adapter, *, drops_untraced: bool) -> None:
        """Set up an observer; with `drops_untraced`, steps that nothing compares came before the first traced one."""
        self._parameters = parameters
        self._adapter = adapter
        self._drops = drops_untraced
        self._is_due = self._was_observed = False
        self._names: dict[str, None] = {}
        self._is_nonzero: list[tuple[str, torch.Tensor]] = []
        """Whether each gradient has an element that is not zero: not read from the device yet."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The parameters with stale gradients; None if no backward pass was observed."""
        results = read_numbers(result for _, result in self._is_nonzero)
        self._names |= {name: None for (name, _), result in zip(self._is_nonzero, results, strict=True) if result}
        self._is_nonzero.clear()
        return tuple(self._names) if self._was_observed else None

    def on_start(self) -> None:
        """Begin a step."""
        self._is_due = True

    def on_backward(self) -> None:
        """Look at the gradients if this is the first backward pass of the step.

        Gradients of untraced steps are dropped: the two sides made them from different parameters and data.
        """
        if not self._is_due:
            return
        self._is_due, self._was_observed = False, True
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            local = self._adapter.to_local(gradient).detach()
            values = local.coalesce().values() if local.is_sparse else local
            self._is_nonzero.append((name, (values != 0).any()))
            if self._drops:
                parameter.grad = None
        self._drops = False


_UNTRACED = (Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.GRAD_NORM, Kind.CLIP, Kind.MAIN_GRAD)
"""Kinds that need all gradients at once, or memory for each parameter."""


@dataclass(frozen=True)
class Streaming:
    """The limits that follow from the number of streamed parameters."""

    num_streamed: int
    recomputes: bool = False
    """Whether modules run again in backward, only because backward needs their parameters' values."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> Streaming:
        sources = [source for parameter in parameters if (source := find_source(parameter)) is not None]
        return cls(len(sources), any(source.recomputes for source in sources))

    @property
    def untraced(self) -> tuple[Kind, ...]:
        return _UNTRACED if self.num_streamed else ()

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.num_streamed:
            return ()
        return (
            f"{self.num_streamed} parameters are streamed: there is no optimizer's state, so that updates and the norm "
            "of all gradients are not traced",
        )
