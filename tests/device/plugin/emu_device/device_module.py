"""`torch.emu`: what scripts and torch itself call on a device's module."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch


def _index(device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    """A stream, made as CUDA's are: with a device, or by what identifies one."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        if identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, f"emu:{_index(device)}", priority=priority)


class Event(torch.Event):
    """An event, made as CUDA's are."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:  # noqa: ARG004
        return super().__new__(cls, "emu", enable_timing=enable_timing)


@contextlib.contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Make a device the current one."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def make_module(extension: Any) -> Any:
    """Make `torch.emu`; `set_lag`, `waits` and `kernels` and so on are for tests."""
    module: Any = types.ModuleType("torch.emu")

    def generator(device: Any = None) -> Any:
        return extension.default_generator(_index(device))

    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = lambda: None
    module.device_count = extension.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.device = on_device
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.Stream, module.Event = Stream, Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.get_rng_state = lambda device="emu": generator(device).get_state()
    module.set_rng_state = lambda state, device="emu": generator(device).set_state(state)
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator(i).manual_seed(seed) for i in range(extension.device_count())]
    module.initial_seed = lambda: generator().initial_seed()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda including_emulation=True: True  # noqa: ARG005
    module.memory_allocated = lambda device=None: torch.accelerator.memory_allocated(_index(device))
    module.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated(_index(device))
    module.empty_cache = lambda: None
    module.default_generators = tuple(generator(i) for i in range(extension.device_count()))

    for name in ("set_random_sums", "waits", "kernels", "kernels_without_shape", "clear_logs"):
        setattr(module, name, getattr(extension, name))
    module.set_lag = lambda lag, side=None: extension.set_lag(lag, lag if side is None else side)
    module.peak_pinned_bytes, module.reset_peak_pinned_bytes = (
        extension.peak_pinned_bytes,
        extension.reset_peak_pinned_bytes,
    )
    return module
