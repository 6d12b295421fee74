"""The device "emu": an accelerator made of host memory and threads, with collectives "eccl". See csrc.

With this folder's parent on PYTHONPATH, torch loads it by itself, as it loads every device of another package. The
extension is built at the first use and kept in the user's cache.

EMU_LAG_MS: how late kernels start; EMU_SIDE_LAG_MS: those of streams that are not the default one; EMU_DEVICES: the
number of devices; EMU_RANDOM_SUMS=1: sums in another order each time; EMU_ONE_ACCUMULATOR=1: products add up their
terms one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

import torch

_registered: list[Any] = []


def load() -> None:
    """Build the device if needed and register it with torch; a second call does nothing."""
    if _registered:
        return
    _registered.append(None)
    from emu_device.build import build
    from emu_device.device_module import make_module

    utils: Any = torch.utils
    utils.rename_privateuse1_backend("emu")
    extension = build()
    torch._register_device_module("emu", make_module(extension))
    utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    _register_collectives(extension)
    atexit.register(_finish)


def _register_collectives(extension: Any) -> None:
    import torch.distributed as dist

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension.Comm(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("eccl", make, devices=["emu"])


def _finish() -> None:
    """Wait for all kernels: threads must not work while the process is taken down."""
    with contextlib.suppress(RuntimeError):  # of a device that failed
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
