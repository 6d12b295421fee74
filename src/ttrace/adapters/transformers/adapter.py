"""Adapter for Hugging Face transformers models, distributed by their own plans."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.adapter import Optimizer
from ttrace.adapters.native.adapter import MeshLike, Native
from ttrace.adapters.transformers.layouts import find_models
from ttrace.compat.torch import unwrap_compiled
from ttrace.layouts.ids import Site
from ttrace.layouts.rules import Rule


class Transformers(Native):
    """Plain PyTorch, with the layouts that the plans of transformers models state."""

    def __init__(
        self, chunks: Sequence[nn.Module], optimizer: Optimizer | None = None, *, mesh: MeshLike | None = None
    ) -> None:
        self.models = find_models([unwrap_compiled(chunk) for chunk in chunks])
        super().__init__(chunks, optimizer, mesh=mesh)

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:
        if "transformers.modeling_utils" not in sys.modules:
            return False  # only a script that uses transformers has loaded it
        return bool(find_models([unwrap_compiled(chunk) for chunk in chunks]))

    def find_device_meshes(self) -> Iterable[DeviceMesh]:
        return [*super().find_device_meshes(), *self.models.meshes()]

    @cached_property
    def distributing_axes(self) -> frozenset[str]:
        return super().distributing_axes | self.models.distributing_axes(self.mesh)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.models.notes())

    def is_watched(self, name: str, *, isolated: bool) -> bool:  # noqa: ARG002
        return self.models.is_watched(name)

    def find_rule(self, site: Site, num_dims: int) -> Rule | None:  # noqa: ARG002
        return self.models.find_rule(site, self.mesh)

    def to_local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:
        local = super().to_local(tensor, site)
        return self.models.mask_values(site, local, self.coord) if site else local
