"""Which module runs, and which module's forward made an autograd node.

Unlike `hooks.py`, which sees what a module's own forward takes and returns, this counts what other hooks of the module
do as part of it: DTensor and FSDP2 communicate there.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ttrace.compat import torch as torch_compat


@dataclass(frozen=True, slots=True)
class _OpenCall:
    module: nn.Module
    name: str
    first_node: int
    is_recompute: bool


class ModuleSpans:
    """Observer of the calls of the given modules, until `remove`."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._open: list[_OpenCall] = []
        self._spans: list[tuple[int, int, str]] = []
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                module.register_forward_hook(self._end),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self) -> None:
        """Forget all calls of earlier steps."""
        self._open.clear()
        self._spans.clear()

    def find_running(self) -> str:
        """Find the innermost module that runs, in a forward or a recomputation; empty if there is none."""
        # A recomputation stops early, with an exception, and leaves its calls open.
        is_recompute = torch_compat.is_in_backward()
        return self._open[-1].name if self._open and self._open[-1].is_recompute == is_recompute else ""

    def find_maker(self, node_number: int) -> str:
        """Find the innermost module whose forward made the autograd node of this number; empty if none did.

        Calls are listed as they ended, the inner ones first, so that their last nodes are in order.
        """
        begin = bisect.bisect_right(self._spans, node_number, key=itemgetter(1))
        later = itertools.islice(self._spans, begin, None)
        return next((name for first, _, name in later if first <= node_number), "")

    def _begin(self, name: str, module: nn.Module, _args: Any) -> None:
        number, is_recompute = torch_compat.read_sequence_nr(), torch_compat.is_in_backward()
        self._open.append(_OpenCall(module, name, number, is_recompute))

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        while self._open:
            call = self._open.pop()
            if call.module is module:
                self._spans.append((call.first_node, torch_compat.read_sequence_nr(), call.name))
                return
