"""Replicas: the tensors of this rank that must be equal on other ranks, and their fingerprints.

A fingerprint is a 64-bit number that changes if any bit of the tensor does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
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
"""Axes along which ranks have different tensors."""
_WORD = 8
"""The number of bytes that are read as one number."""
_ON_HOST, _ON_DEVICE = 1 << 18, 1 << 24
"""How many numbers are multiplied at once: enough to fit a core's cache, and to keep a device busy."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class HeldReplica:
    """A tensor of this rank, and the axes along which other ranks must hold the same values."""

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
        """The parameters with unknown layout, which are compared along the data axes only."""
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
        if local.ndim == 0:  # the optimizer's step count is the same for every shard
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
        factorisation = next((axes for axes in factorisations if cutting <= set(axes)), [])
        return frozenset(factorisation) - cutting - set(_OWN)


def make_fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the fingerprint of a tensor's bytes, as a scalar on its device, without a synchronisation.

    It is the sum of all 64-bit words, each times an odd number that depends on its position. Odd numbers have an
    inverse modulo 2**64, so a change of a single word always changes the sum. A change of several words goes undetected
    with probability 2**-64.
    """
    words = _read_words(tensor)
    size = _ON_HOST if words.is_cpu else _ON_DEVICE
    factors = _make_factors(size, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(size):
        own = factors[: len(part)]
        # Devices do not implement torch.dot for integers.
        total = total * 3 + (torch.dot(part, own) if words.is_cpu else (part * own).sum())
    return total


def read_fingerprints(fingerprints: Iterable[torch.Tensor]) -> list[int]:
    """Copy fingerprints to the host, with one synchronisation for each device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, each in enumerate(fingerprints):
        by_device.setdefault(each.device, []).append((number, each))
    values_by_number: dict[int, int] = {}
    for numbered in by_device.values():
        values = torch.stack([each for _, each in numbered]).tolist()
        values_by_number |= dict(zip((number for number, _ in numbered), values, strict=True))
    return [values_by_number[number] for number in range(len(values_by_number))]


def combine(named: Iterable[tuple[str, int]]) -> int:
    """Combine named fingerprints into one, independently of their order."""
    total = sum(value * _make_factor(name) for name, value in named) & _MASK
    return total - (1 << 64) if total >> 63 else total


def make_text_fingerprint(text: str) -> int:
    """Compute the fingerprint of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD).digest(), "little", signed=True)


@functools.cache
def _make_factor(name: str) -> int:
    return make_text_fingerprint(name) | 1


def _read_words(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor as 64-bit numbers, padded with zeros."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.nbytes % _WORD or flat.storage_offset() * flat.element_size() % _WORD:
        flat = F.pad(flat.view(torch.uint8), (0, -flat.nbytes % _WORD))
    return flat.view(torch.int64)


@functools.cache
def _make_factors(size: int, device: torch.device) -> torch.Tensor:
    """Make the odd numbers of all positions, the same on every rank, without using the script's random generator."""
    generator = torch.Generator("cpu").manual_seed(size)
    numbers = torch.randint(-(1 << 62), 1 << 62, (size,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers * 2 + 1).to(device)
