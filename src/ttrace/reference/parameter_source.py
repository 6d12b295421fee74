"""Source of a parameter's values, which are made whenever somebody reads them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ttrace.reference.progress import StreamProgress
from ttrace.tensors import ranges as rg
from ttrace.tensors.ids import TensorId
from ttrace.tensors.region import Region, Shape
from ttrace.values.generate import Distribution, generate_values

_ATTRIBUTE = "_ttrace_maker"
_LEAST_ELEMENTS = 1 << 18
"""Fewer are not worth a thread of their own."""


class Scratch(threading.local):
    """Memory that is used again and again: fresh pages cost as much as the values that are written to them."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.device], torch.Tensor] = {}

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Who makes values."""
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ttrace-maker")

    def memory(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Room for so many elements; what was in this slot is lost."""
        num_bytes = numel * dtype.itemsize
        if (slot, device) not in self._slots or self._slots[slot, device].numel() < num_bytes:
            self._slots.pop((slot, device), None)  # before there is a larger one
            self._slots[slot, device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._slots[slot, device][:num_bytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in here."""
        if tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(address == memory.untyped_storage().data_ptr() for memory in self._slots.values())


@dataclass
class Maker:
    """All that there is of a streamed parameter: what its values are drawn from."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    name: str | TensorId
    distribution: Distribution
    scratch: Scratch
    progress: StreamProgress
    seed: int = 0
    num_owners: int = 1
    """How many modules hold the parameter: more than one if it is tied."""
    max_bytes: int | None = None
    """The weight of a linear layer that takes more is used in slices of this size."""
    num_microbatches: int = 1
    """How many backward passes add to the gradient before it is complete."""
    recomputes: bool = False
    """Whether its module is run again in backward, to have its values there once more."""
    arrived: Callable[[torch.Tensor, int], None] | None = field(default=None, repr=False)
    """Told of a leaf whose gradient has grown, and of the row of the parameter at which the leaf begins."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def run(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """These elements of the flattened parameter, made by as many threads as operators have."""
        self.progress.reads(stop - start)
        width = max(math.prod(self.shape[1:]), 1)
        num_threads = min(torch.get_num_threads(), (stop - start) // _LEAST_ELEMENTS) if out.is_cpu else 1
        step = -(-(stop - start) // max(num_threads, 1))
        step += -step % width
        parts = [(at, out[at - start : at - start + step]) for at in range(start, stop, step)]
        if len(parts) == 1:
            self._make(*parts[0])
        else:
            list(self.scratch.threads.map(self._make, *zip(*parts, strict=True)))
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """These rows, each one once."""
        region = Region(self.shape, (rg.from_indices(index), *map(rg.whole, self.shape[1:])))
        self.progress.reads(region.numel)
        return self._made(region, torch.empty(region.local_shape, dtype=self.dtype, device=self.device))

    def tell(self, leaf: torch.Tensor, start: int = 0) -> None:
        """A leaf's gradient has grown."""
        self.progress.completes(leaf.numel())
        if self.arrived is not None:
            self.arrived(leaf, start)

    def _make(self, start: int, out: torch.Tensor) -> None:
        # Whole rows are a box, which is made faster than a run of the flattened tensor.
        width, stop = math.prod(self.shape[1:]), start + out.numel()
        if not self.shape or start % width or stop % width:
            region = Region.flat_of(self.shape, ((start, stop),))
        else:
            region = Region(self.shape, (((start // width, stop // width),), *map(rg.whole, self.shape[1:])))
        self._made(region, out.view(region.local_shape))

    def _made(self, region: Region, out: torch.Tensor) -> torch.Tensor:
        return generate_values(
            self.name,
            region,
            dtype=self.dtype,
            distribution=self.distribution,
            seed=self.seed,
            device=self.device,
            out=out,
        )


def maker_of(parameter: torch.Tensor) -> Maker | None:
    """What makes a parameter's values; None for a parameter that has values of its own."""
    found: Maker | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def set_maker(parameter: torch.Tensor, maker: Maker) -> None:
    setattr(parameter, _ATTRIBUTE, maker)
