"""Replicas: which tensors of this rank must be equal on which others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, OwnedSlice
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.names import Names
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import Placement
from ttrace.layouts.rules import Rules

_OWN = ("pp",)
"""Axes along which ranks have tensors of their own."""


@dataclass(frozen=True)
class HeldReplica:
    """A tensor of this rank, and the axes along which other ranks have the same."""

    site: str
    tensor: torch.Tensor
    axes: frozenset[str]
    kind: Kind


class Replicas:
    """The state of a model and its optimizer on this rank, with the axes along which it is replicated."""

    def __init__(self, adapter: Adapter, optimizer: Optimizer | None, rules: Rules) -> None:
        self._adapter = adapter
        self._optimizer = optimizer
        self._resolver = LayoutResolver(adapter, rules, ReferenceTrace(None), 1)
        self._names = Names(adapter.chunks, adapter.name)
        self.parameters: Mapping[str, nn.Parameter] = self._names.parameters()[0]
        self._placements: dict[str, Placement | None] = {}

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """The parameters of which nothing says how they are cut: they are compared along the axes of data only."""
        return tuple(name for name, parameter in self.parameters.items() if self._place(name, parameter) is None)

    def collect(self) -> Iterator[HeldReplica]:
        """Collect parameters, gradients, the optimizer's state and buffers, in this order."""
        adapter, parameters = self._adapter, self.parameters
        for name, parameter in parameters.items():
            yield self._make(name, Kind.PARAM, "", parameter, adapter.read_values(parameter))
        for name, parameter in parameters.items():
            gradient = adapter.read_gradient(parameter)
            if gradient is not None:
                yield self._make(name, Kind.PARAM_GRAD, "", parameter, gradient)
        for name, parameter in parameters.items() if self._optimizer is not None else ():
            for slot, owned in adapter.read_optimizer_state(self._optimizer, parameter).items():
                yield self._make(name, Kind.OPTIM, f".{slot}", parameter, owned)
        for name, buffer in self._names.buffers().items():
            axes = self._find_axes(self._resolver.resolve(TensorId.of(0, None, name, Kind.BUFFER), buffer), buffer)
            yield HeldReplica(f"{name}/{Kind.BUFFER}", adapter.to_local(buffer), axes, Kind.BUFFER)

    def _make(self, name: str, kind: Kind, slot: str, parameter: nn.Parameter, owned: OwnedSlice) -> HeldReplica:
        local = self._adapter.to_local(owned.tensor)
        axes = self._find_axes(self._place(name, parameter), parameter)
        if local.ndim == 0:  # a count of steps is the same for every shard
            axes = frozenset(self._mesh_axes) - set(_OWN)
        elif owned.run is not None:
            axes -= set(self._data_axes)
        return HeldReplica(f"{name}/{kind}{slot}", local, axes, kind)

    def _place(self, name: str, parameter: nn.Parameter) -> Placement | None:
        if name not in self._placements:
            owned = self._adapter.read_values(parameter)
            tensor_id = TensorId.of(0, None, name, Kind.PARAM)
            self._placements[name] = self._resolver.resolve(tensor_id, owned.tensor)
        return self._placements[name]

    @property
    def _mesh_axes(self) -> list[str]:
        """The axes of the first factorisation."""
        return [axis for axis, _ in self._adapter.mesh.factorisations[0]]

    @property
    def _data_axes(self) -> Iterable[str]:
        return {*self._adapter.data_axes, *self._adapter.distributing_axes}

    def _find_axes(self, placement: Placement | None, tensor: torch.Tensor) -> frozenset[str]:
        """Find the axes along which a tensor is replicated: those of its factorisation that do not cut it."""
        if placement is None:
            return frozenset(self._adapter.data_axes) - set(_OWN)
        cutting = Layout.parse(placement.layout).of_rank(tensor.ndim).axes if placement.layout else frozenset()
        factorisations = [[axis for axis, _ in part] for part in self._adapter.mesh.factorisations]
        fitting = next((axes for axes in factorisations if cutting <= set(axes)), [])
        return frozenset(fitting) - cutting - set(_OWN)
