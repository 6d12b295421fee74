"""Whether a script that goes on from a checkpoint loads every parameter and buffer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch

from ttrace.trace.storage.tensor_bytes import view_memory

Read = Callable[[], Mapping[str, torch.Tensor]]


class LoadWatch:
    """Observer of what a model holds, from the moment when the session attaches until the first step begins."""

    def __init__(self, read: Read) -> None:
        """Begin to watch; `read` returns this rank's parameters and buffers by name."""
        self._read = read
        self._before = self._sum_up()

    def find_unloaded(self) -> tuple[str, ...]:
        """Find what has not changed while others have; nothing if the script loaded before it attached."""
        now = self._sum_up()
        same = [name for name, value in now.items() if value == self._before.get(name)]
        return tuple(same) if len(same) < len(now) else ()

    def _sum_up(self) -> dict[str, int]:
        return {name: _sum_bytes(tensor) for name, tensor in self._read().items()}


def _sum_bytes(tensor: torch.Tensor) -> int:
    values = tensor.detach().to("cpu").contiguous()
    return zlib.crc32(view_memory(values))
