"""Modules that draw random numbers while they run, found by the generators' state around each call.

Reading the state changes nothing, so the stream of random numbers stays what it is without recording.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ttrace.capture.observe.hooks import is_recompute
from ttrace.compat import torch as torch_compat
from ttrace.layouts.ids import ROOT

RngState = tuple[torch.Tensor, ...]


@dataclass
class _Frame:
    """A running call: the generators' state when it began, and before and after each call inside it."""

    name: str
    module: nn.Module
    states: list[RngState] = field(default_factory=list)

    def drew_itself(self) -> bool:
        """Whether the state changed in this call's own code, and not only in calls inside it.

        A call that restores the state leaves no trace of its draws, as forks of the generators around inner calls do.
        """
        if _is_same(self.states[0], self.states[-1]):
            return False
        own = zip(self.states[::2], self.states[1::2], strict=True)
        return any(not _is_same(before, after) for before, after in own)


class RngUse:
    """Observer of the given modules while `is_watched()` is true, until `remove`.

    `modules` are the innermost modules that drew random numbers.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], is_watched: Callable[[], bool]) -> None:
        self.modules: dict[str, None] = {}
        self._is_watched = is_watched
        self._readers = _find_readers()
        self._running: list[_Frame] = []
        self._handles: list[RemovableHandle] = []
        if dist.is_initialized() and dist.get_backend() == "threaded":
            return  # ranks that are threads share a generator, so it is unknown which rank drew
        for name, module in modules:
            # Last before the call and first after it, so that draws of other hooks are not counted as the module's.
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, name)),
                module.register_forward_hook(self._after, prepend=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        with torch_compat.outside_function_modes():
            if name == ROOT:
                self._running.clear()  # an exception may have ended the last forward
            # An evaluation does not count, and neither does a recomputation, which draws what the first forward drew.
            is_training = torch.is_grad_enabled() or bool(self._running)
            if not self._is_watched() or not is_training or is_recompute():
                return
            now = self._read_state()
            if self._running:
                self._running[-1].states.append(now)
            self._running.append(_Frame(name, module, [now]))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        with torch_compat.outside_function_modes():
            if is_recompute() or not any(frame.module is module for frame in self._running):
                return
            now = self._read_state()
            ended = None
            while ended is not module:  # this hook did not run for inner calls that an exception ended
                frame = self._running.pop()
                ended = frame.module
                frame.states.append(now)
                if self._running:
                    self._running[-1].states.append(now)
                if frame.drew_itself():
                    self.modules[frame.name] = None

    def _read_state(self) -> RngState:
        return tuple(read() for read in self._readers)


def _find_readers() -> tuple[Callable[[], torch.Tensor], ...]:
    """Return functions that read the state of the generators that operators use by default."""
    if torch.accelerator.is_available():
        return torch.get_rng_state, torch.get_device_module().get_rng_state
    return (torch.get_rng_state,)


def _is_same(a: RngState, b: RngState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


Restore = Callable[[], object]


def save_generators() -> Restore:
    """Save the state of all random generators that scripts share; return a function that restores it."""
    restores = (_save_python(), _save_numpy(), _save_torch(), _save_accelerator())

    def restore_all() -> None:
        for restore in restores:
            restore()

    return restore_all


def _save_python() -> Restore:
    state = random.getstate()
    return lambda: random.setstate(state)


def _save_numpy() -> Restore:
    if "numpy" not in sys.modules:
        return lambda: None
    numbers: Any = sys.modules["numpy"].random
    state = numbers.get_state()
    return lambda: numbers.set_state(state)


def _save_torch() -> Restore:
    state = torch.get_rng_state()
    return lambda: torch.set_rng_state(state)


def _save_accelerator() -> Restore:
    if not torch.accelerator.is_available():
        return lambda: None
    device: Any = torch.get_device_module()
    state = device.get_rng_state()
    return lambda: device.set_rng_state(state)
