"""Values that are kept from the forward pass of a parameter's operator to its backward, where there is memory for them.

Backward reads parameters in the opposite order, so those that were read last are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from ttrace.compat import torch as torch_compat

_MOST_ARGUMENTS = 8
"""The latest values may be arguments of the operator that reads the next ones: their memory is not used again yet."""


class KeptValues:
    """Whole parameters, the latest ones. Their memory is used again: fresh pages take as long to touch as to fill."""

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
        """Read a whole parameter: keep it in forward, and give it back once in backward; None if it is not kept."""
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
        """Whether a tensor lies in this memory, which is used again."""
        address = tensor.untyped_storage().data_ptr()
        memory = (*self._kept.values(), *self._free, *([self._lent] if self._lent is not None else []))
        return any(address == each.untyped_storage().data_ptr() for each in memory)

    def _take(self, name: Hashable) -> torch.Tensor:
        """Take what is kept; in backward for the last time."""
        memory = self._kept[name]
        if torch_compat.is_in_backward():
            self._free_lent()
            self._lent = self._kept.pop(name)
        return memory

    def _free_lent(self) -> None:
        """Use the memory of the last values that were given back again: their operator has ended."""
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None

    def _find_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Find free memory of this size; drop what was read first, until there is room."""
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
