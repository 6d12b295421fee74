"""Sources of streamed parameters, whose values are generated whenever an operator reads them.

Parameters on the meta device were never initialised, so `choose_distribution` chooses their mean and standard
deviation:

| parameter | mean | std |
|---|---|---|
| `weight` of a module with "norm" in its class's name | 1 | 0.02 |
| any other with at most one dim: biases, gains | 0 | 0.02 |
| all others: matrices, tables, experts | 0 | 0.02, but at most 1 / sqrt(last dim) |

The limit keeps activations of wide layers from growing with the width. No parameter is constant, because zero biases
and unit norms hide bugs.

`KeptValues` keeps values from an operator's forward to its backward if there is memory for them. Backward reads
parameters in reverse order, so the values that were read last are kept.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ttrace.compat import torch as torch_compat
from ttrace.compat.torch import is_in_backward
from ttrace.errors import CaptureError
from ttrace.layouts import ranges as rg
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region, Shape
from ttrace.values.generate import Distribution, Normal, generate_values

_ATTRIBUTE = "_ttrace_source"
_LEAST_ELEMENTS = 1 << 18
"""The least number of elements for which another thread is used."""
STD = 0.02
Spreads = Mapping[str, tuple[float, float]]
"""Mean and standard deviation for patterns over names of parameters; the last match applies."""
INTERVAL = 10.0
"""Seconds between two lines of progress; a shorter step prints nothing."""
_BACKWARD = 2
"""The work of a backward pass, relative to the forward pass."""
_MOST_ARGUMENTS = 8
"""How many of the latest values may be arguments of the next operator, and are therefore not overwritten."""


class Scratch(threading.local):
    """Memory that is reused, because touching new pages costs as much as generating the values."""

    def __init__(self, kept: KeptValues | None = None) -> None:
        """Set up the memory; the values in `kept`, which all threads share, outlive their operator."""
        self.kept = kept
        self._slots: dict[tuple[int, torch.device], torch.Tensor] = {}

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """The threads that generate values."""
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ttrace-values")

    def memory(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for this many elements, which overwrites the previous contents of the slot."""
        num_bytes = numel * dtype.itemsize
        if (slot, device) not in self._slots or self._slots[slot, device].numel() < num_bytes:
            self._slots.pop((slot, device), None)  # frees it before a larger one is allocated
            self._slots[slot, device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._slots[slot, device][:num_bytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor uses this memory."""
        if tensor.layout is not torch.strided:
            return False
        if self.kept is not None and self.kept.holds(tensor):
            return True
        address = tensor.untyped_storage().data_ptr()
        return any(address == memory.untyped_storage().data_ptr() for memory in self._slots.values())


class StreamProgress:
    """Progress of a streamed step: the elements of parameters that forward has read, and of complete gradients."""

    def __init__(
        self,
        numel: int,
        num_microbatches: int = 1,
        write: Callable[[str], object] | None = None,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self._total = max(numel, 1) * num_microbatches * (1 + _BACKWARD)
        self._num_microbatches = num_microbatches
        self._write = write or _to_stderr
        self._interval = interval
        self._is_backward = False
        self._begin()

    def on_read(self, numel: int) -> None:
        """Count a parameter that forward reads. Reads in backward are counted with its gradient."""
        if is_in_backward():
            return
        if self._is_backward and self._num_passes == self._num_microbatches:
            self._begin()
        self._is_backward = False
        self._grow(numel)

    def on_gradient(self, numel: int) -> None:
        """Count a complete gradient."""
        self._num_passes += not self._is_backward
        self._is_backward = True
        self._grow(numel * _BACKWARD)

    def _begin(self) -> None:
        """Begin a step."""
        self._done = self._num_passes = 0
        self._start = self._last_line = time.monotonic()

    def _grow(self, work: int) -> None:
        self._done += work
        now = time.monotonic()
        if now - self._last_line >= self._interval and work:
            self._last_line = now
            share = min(self._done / self._total, 1.0)
            left = (now - self._start) * (1 / share - 1)
            self._write(f"ttrace: streamed {share:.0%} of the step, about {_format_time(left)} left")


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
    """The number of modules that have the parameter: more than one if it is tied."""
    max_bytes: int | None = None
    """Linear layers with a larger weight use it in slices of this size."""
    num_microbatches: int = 1
    """The number of backward passes after which the gradient is complete."""
    recomputes: bool = False
    """Whether the parameter's module runs again in backward, to have its values."""
    on_gradient: Callable[[torch.Tensor, int], None] | None = field(default=None, repr=False)
    """Called with a leaf whose gradient was accumulated, and the row of the parameter at which the leaf begins."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def generate_run(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """Generate these elements of the flattened parameter, with the number of threads that torch uses."""
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
        """Read all elements, flattened, from memory in which they are kept; None if they are not kept."""
        kept = self.scratch.kept
        if kept is None:
            return None
        name = (self.name, self.seed, self.distribution)  # a session changes seed and distribution
        return kept.read(name, self.numel, self.dtype, self.device, lambda out: self.generate_run(0, self.numel, out))

    def generate_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Generate these rows."""
        region = Region(self.shape, (rg.from_indices(index), *map(rg.whole, self.shape[1:])))
        self.progress.on_read(region.numel)
        return self._generate(region, torch.empty(region.local_shape, dtype=self.dtype, device=self.device))

    def report_gradient(self, leaf: torch.Tensor, start: int = 0) -> None:
        """Report that the gradient of a leaf was accumulated."""
        self.progress.on_gradient(leaf.numel())
        if self.on_gradient is not None:
            self.on_gradient(leaf, start)

    def _generate_slice(self, start: int, out: torch.Tensor) -> None:
        # Whole rows form a box, which is generated faster than a run of the flattened tensor.
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
    """Return the source of a parameter's values; None for an ordinary parameter."""
    source: ParameterSource | None = getattr(parameter, _ATTRIBUTE, None)
    return source


def set_source(parameter: torch.Tensor, source: ParameterSource) -> None:
    setattr(parameter, _ATTRIBUTE, source)


def choose_distribution(name: str, parameter: torch.Tensor, owner: nn.Module, stated: Spreads) -> Normal:
    """Choose the distribution of a parameter; the module's docstring has the rule."""
    for pattern, (mean, std) in reversed(list(stated.items())):
        if fnmatchcase(name, pattern):
            return Normal(float(mean), float(std))
    if parameter.ndim < 2:
        is_gain = "norm" in type(owner).__name__.lower() and name.endswith("weight")
        return Normal(1.0 if is_gain else 0.0, STD)
    return Normal(0.0, min(STD, max(parameter.shape[-1], 1) ** -0.5))


def check_patterns(stated: Spreads, names: list[str]) -> None:
    """Raise an error for a pattern that matches no parameter, which would otherwise go unnoticed."""
    for pattern in stated:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CaptureError(
                f"spreads has {pattern!r}, but no streamed parameter has such a name; the first is {names[0]}."
            )


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it; buffers keep their values."""
    known = WeakTensorKeyDictionary()  # so that a parameter that two modules share stays one parameter

    def move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:  # noqa: ARG001
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in known:
            known[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(known[parameter]).update(vars(parameter))
        on_meta: nn.Parameter = known[parameter]
        return on_meta

    handle = register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def check_buffers(model: nn.Module) -> None:
    """Raise an error if the model was moved to the meta device together with its buffers."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise CaptureError(
                f"buffer {name} is on the meta device and has no values. Let ttrace.streamed build the model, as in "
                "ttrace.streamed(lambda: Model(config)), which leaves buffers on their device."
            )


class KeptValues:
    """The values of the parameters that were read last. Their memory is reused, as in `Scratch`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._free: list[torch.Tensor] = []
        self._lent: torch.Tensor | None = None
        self._lock = threading.Lock()

    def read(
        self,
        name: Hashable,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        fill: Callable[[torch.Tensor], object],
    ) -> torch.Tensor | None:
        """Read a whole parameter. Forward keeps the values, backward returns and releases them; None if not kept."""
        num_bytes = numel * dtype.itemsize
        with self._lock:
            if name in self._kept:
                return self._take(name).view(dtype)
            is_forward = torch.is_grad_enabled() and not torch_compat.is_in_backward()
            if not is_forward or num_bytes > self._max_bytes:
                return None
            memory = self._find_memory(num_bytes, device)
            self._kept[name] = memory
        fill(memory.view(dtype))
        return memory.view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor uses this memory, which will be overwritten."""
        address = tensor.untyped_storage().data_ptr()
        memory = (*self._kept.values(), *self._free, *([self._lent] if self._lent is not None else []))
        return any(address == each.untyped_storage().data_ptr() for each in memory)

    def _take(self, name: Hashable) -> torch.Tensor:
        """Return kept values; in backward, release them after the current operator."""
        memory = self._kept[name]
        if torch_compat.is_in_backward():
            self._free_lent()
            self._lent = self._kept.pop(name)
        return memory

    def _free_lent(self) -> None:
        """Free the memory of the values that were returned last, because their operator has ended."""
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None

    def _find_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Find free memory of this size; drop the values that were read first until there is room."""
        self._free_lent()
        for number, memory in enumerate(self._free):
            if memory.numel() == num_bytes and memory.device == device:
                return self._free.pop(number)
        while self._kept and self._count() + num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            if oldest.numel() == num_bytes and oldest.device == device and len(self._kept) >= _MOST_ARGUMENTS:
                return oldest
        while self._free and self._count() + num_bytes > self._max_bytes:
            self._free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _count(self) -> int:
        return sum(memory.numel() for memory in (*self._kept.values(), *self._free))


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _format_time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
