"""Adapter for torchtitan.

Its models are plain PyTorch with DTensors and FSDP2, or with plain tensors whose layouts spmd_types keeps. It
states them only while it checks types. Without them, pending sums of gradients cannot be distinguished from wrong
gradients, so such a run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.adapter import FrameworkEvents
from ttrace.adapters.native.adapter import DATA_AXIS, Native
from ttrace.adapters.native.layouts import read_axis_names
from ttrace.adapters.torchtitan import compat
from ttrace.errors import CaptureError
from ttrace.layouts.ids import is_inside


class Torchtitan(Native):
    """Adapter for torchtitan's models."""

    _is_in_loss = False

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:
        return any(map(compat.is_model, chunks))

    def find_device_meshes(self) -> Iterable[DeviceMesh]:
        mesh = compat.find_typed_mesh()
        return [*([] if mesh is None else [mesh]), *super().find_device_meshes()]

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        mesh = compat.find_typed_mesh()
        return super().data_axes if mesh is None else tuple({DATA_AXIS} & set(read_axis_names(mesh)))

    def is_watched(self, name: str, *, isolated: bool) -> bool:
        """Return whether a module's calls can be compared: the tokens of a chunked loss depend on the layout."""
        is_chunked = is_inside(name, compat.HEAD) and any(map(compat.has_chunked_loss, self.chunks))
        return not is_chunked and super().is_watched(name, isolated=isolated)

    @property
    def is_in_loss(self) -> bool:
        return self._is_in_loss

    def attach(self, events: FrameworkEvents) -> None:
        super().attach(events)
        if (chunked := compat.find_chunked_loss()) is not None:
            self.patches.wrap(chunked, "__call__", self._wrap_loss)
        is_cut = any(size > 1 for axis, size in self.mesh.sizes.items() if axis not in self.distributing_axes)
        if is_cut and compat.is_typed():
            for chunk in self.chunks:
                self.patches.on_remove(chunk.register_forward_pre_hook(_check_types).remove)

    def _wrap_loss(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the backward passes of the loss's chunks."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_in_loss = True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_in_loss = False

        return call


def _check_types(module: nn.Module, args: Any) -> None:  # noqa: ARG001
    """Raise an error if tensors have no types in training; evaluations are not traced."""
    if torch.is_grad_enabled() and not compat.is_checking_types():
        raise CaptureError(
            "torchtitan keeps layouts as types here (parallelism.spmd_backend is spmd_types), and tensors have types "
            "only while they are checked. Set debug.spmd_typechecking to true; it works neither with pipelining nor "
            "with selective checkpointing of FlexAttention, and with context parallelism only if the loss is chunked. "
            'Or set parallelism.spmd_backend to "partial_dtensor".'
        )
