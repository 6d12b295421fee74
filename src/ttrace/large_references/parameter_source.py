"""Source of a parameter's values, which are generated whenever an operator reads them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region, Shape
from ttrace.reference.kept_values import KeptValues
from ttrace.reference.progress import StreamProgress
from ttrace.tensors import ranges as rg
from ttrace.values.generate import Distribution, generate_values

_ATTRIBUTE = "_ttrace_source"
_LEAST_ELEMENTS = 1 << 18
"""Fewer elements are not worth a thread of their own."""


class Scratch(threading.local):
    """Memory that is reused: to touch fresh pages costs as much as to generate the values that are written to them."""

    def __init__(self, kept: KeptValues | None = None) -> None:
        """With `kept`, which all threads share, some values outlive their operator."""
        self.kept = kept
        self._slots: dict[tuple[int, torch.device], torch.Tensor] = {}

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """The threads that generate values."""
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ttrace-values")

    def memory(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for this many elements, and overwrite what was in this slot."""
        num_bytes = numel * dtype.itemsize
        if (slot, device) not in self._slots or self._slots[slot, device].numel() < num_bytes:
            self._slots.pop((slot, device), None)  # before there is a larger one
            self._slots[slot, device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._slots[slot, device][:num_bytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        if tensor.layout is not torch.strided:
            return False
        if self.kept is not None and self.kept.holds(tensor):
            return True
        address = tensor.untyped_storage().data_ptr()
        return any(address == memory.untyped_storage().data_ptr() for memory in self._slots.values())


@dataclass
class ParameterSource:
    """The source of a streamed parameter: the distribution and the seed that its values are generated from."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    name: str | TensorId
    distribution: Distribution
    scratch: Scratch
    progress: StreamProgress
    seed: int = 0
    num_owners: int = 1
    """Number of modules that hold the parameter: more than one if it is tied."""
    max_bytes: int | None = None
    """A linear layer with a larger weight uses it in slices of this size."""
    num_microbatches: int = 1
    """Number of backward passes that add to the gradient before it is complete."""
    recomputes: bool = False
    """Whether the parameter's module runs again in backward, because backward needs the values once more."""
    on_gradient: Callable[[torch.Tensor, int], None] | None = field(default=None, repr=False)
    """Called with a leaf whose gradient has grown, and with the row of the parameter at which the leaf begins."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def generate_run(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """Generate these elements of the flattened parameter, with as many threads as operators use."""
        self.progress.on_read(stop - start)
        width = max(math.prod(self.shape[1:]), 1)
        num_threads = min(torch.get_num_threads(), (stop - start) // _LEAST_ELEMENTS) if out.is_cpu else 1
        step = -(-(stop - start) // max(num_threads, 1))
        step += -step % width
        parts = [(at, out[at - start : at - start + step]) for at in range(start, stop, step)]
        if len(parts) == 1:
            self._generate_slice(*parts[0])
        else:
            list(self.scratch.threads.map(self._generate_slice, *zip(*parts, strict=True)))
        return out

    def read_kept(self) -> torch.Tensor | None:
        """Read all elements, flattened, from where they are kept; None if they are not."""
        kept = self.scratch.kept
        if kept is None:
            return None
        name = (self.name, self.seed, self.distribution)  # a session sets what a parameter is generated from
        return kept.read(name, self.numel, self.dtype, self.device, lambda out: self.generate_run(0, self.numel, out))

    def generate_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Generate these rows, each one once."""
        region = Region(self.shape, (rg.from_indices(index), *map(rg.whole, self.shape[1:])))
        self.progress.on_read(region.numel)
        return self._generate(region, torch.empty(region.local_shape, dtype=self.dtype, device=self.device))

    def report_gradient(self, leaf: torch.Tensor, start: int = 0) -> None:
        """Report that the gradient of a leaf has grown."""
        self.progress.on_gradient(leaf.numel())
        if self.on_gradient is not None:
            self.on_gradient(leaf, start)

    def _generate_slice(self, start: int, out: torch.Tensor) -> None:
        # Whole rows are a box, which is generated faster than a run of the flattened tensor.
        width, stop = math.prod(self.shape[1:]), start + out.numel()
        if not self.shape or start % width or stop % width:
            region = Region.flat_of(self.shape, ((start, stop),))
        else:
            region = Region(self.shape, (((start // width, stop // width),), *map(rg.whole, self.shape[1:])))
        self._generate(region, out.view(region.local_shape))

    def _generate(self, region: Region, out: torch.Tensor) -> torch.Tensor:
        return generate_values(
            self.name,
            region,
            dtype=self.dtype,
            distribution=self.distribution,
            seed=self.seed,
            device=self.device,
            out=out,
        )


def find_source(parameter: torch.Tensor) -> ParameterSource | None:
    """Return the source of a parameter's values; None for a parameter that has values of its own."""
    source: ParameterSource | None = getattr(parameter, _ATTRIBUTE, None)
    return source


def set_source(parameter: torch.Tensor, source: ParameterSource) -> None:
    setattr(parameter, _ATTRIBUTE, source)
