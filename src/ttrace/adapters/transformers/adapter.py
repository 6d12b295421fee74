"""Adapter for Hugging Face transformers models, distributed by their own plans.

Under a plan, parameters are DTensors, but modules take and return plain tensors: the plan replaces their `forward` by
one that distributes the inputs and gathers the outputs. The layouts of activations therefore follow from the styles in
the plan. transformers is not imported: a model contains its plans.

The private APIs of transformers are `find_device_mesh` and `has_experts`. Each names the version in which it was seen,
and what happens without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.adapter import Optimizer
from ttrace.adapters.native.adapter import MeshLike, Native
from ttrace.adapters.wrappers import find_canonical_name
from ttrace.compat.torch import unwrap_compiled
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Coord, Mesh
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.rules import Rule


class Transformers(Native):
    """The adapter of plain PyTorch, with layouts from the plans of transformers models."""

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


TP_AXIS, EXPERT_AXIS = "tp", "ep"
"""The axes in transformers of tensor-parallel plans and of dispatched experts."""

_WHOLE, _LAST, _SUM = "...", "... d/tp", "... +tp"
_INDICES, _SCORES = "2", "1"
"""The slots of a router's output: logits, scores and indices of the chosen experts."""
_STYLES: dict[str, dict[str, str]] = {
    "colwise": {"input": _WHOLE, "output": _LAST},
    "colwise_gather_output": {"input": _WHOLE, "output": _WHOLE},
    "colwise_rep": {"input": _WHOLE, "output": _WHOLE},
    "packed_colwise": {"input": _WHOLE, "output": "... d/tp:fused(2)"},
    "rowwise": {"input": _LAST, "output": _WHOLE},
    "rowwise_split_input": {"input": _WHOLE, "output": _WHOLE},
    "rowwise_rep": {"input": _WHOLE, "output": _WHOLE},
    "embedding_rowwise": {"input": _WHOLE, "output": _WHOLE},
    "embedding_colwise": {"input": _WHOLE, "output": _WHOLE},
    "sequence_parallel": {"input": "batch seq/tp ...", "output": "batch seq/tp ..."},
    "all_reduce": {"output": _WHOLE},
    "mla_kv_a_proj": {"input": _WHOLE, "output": _WHOLE, "grad_output": _SUM},
    "moe_tp_experts": {"input": _WHOLE, "output": _WHOLE},
    "ep_dispatch_experts": {"input": _WHOLE, "output": _WHOLE},
    # Each rank has the scores of its own experts and zeros elsewhere; gradients of scores are replicated.
    "ep_router": {
        "input": _WHOLE,
        "output": _WHOLE,
        f"output.{_SCORES}": _SUM,
        f"output.{_INDICES}": _SUM,
    },
}
"""For each style, the layouts of a module's inputs and outputs. Other styles do not state layouts."""
_MASKED_EXPERTS = {
    "input": _WHOLE,
    "input.1": _SUM,
    "input.2": _SUM,
    "output": _WHOLE,
}
"""The layouts of experts after an `ep_router`, whose outputs they get."""
_CHOSEN_EXPERTS = {("ep_router", Kind.OUTPUT, _INDICES), ("moe_tp_experts", Kind.INPUT, "1")}
"""Style, kind and slot of the indices of chosen experts, which a masking router numbers from 0 on every rank."""


@dataclass(frozen=True)
class PlannedModel:
    """A transformers model somewhere in the attached modules, with the plans that were applied to it."""

    names: Mapping[str, str]
    """For each module, by path in this model, its canonical name."""
    module: nn.Module
    styles: Mapping[str, str]
    """For each module, by canonical name, its style."""

    @classmethod
    def at(cls, path: str, chunk: nn.Module, module: nn.Module) -> PlannedModel:
        tp_plan, ep_plan = _read_applied_plans(module)
        names = {
            name: find_canonical_name(".".join(filter(None, (path, name))), chunk) for name, _ in module.named_modules()
        }
        owned = re.compile(rf"(?:{'|'.join(map(re.escape, ep_plan)) or '(?!)'})(?:\..+)?")
        styles = {}
        for name, canonical_name in names.items():
            generic = _generalize_name(name)
            style = ep_plan.get(generic) if owned.fullmatch(generic) else tp_plan.get(generic)
            if style is not None:
                styles[canonical_name] = style
        return cls(names, module, styles)

    def meshes(self) -> Iterator[DeviceMesh]:
        """Yield the device mesh that the model was loaded onto, even if no parameter is distributed over it."""
        mesh = find_device_mesh(self.module)
        if mesh is not None:
            yield mesh

    def modules(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.module.named_modules():
            yield self.names[name], module


class PlannedModels:
    """All transformers models in the attached modules, and the layouts that they state. Names are canonical."""

    def __init__(self, models: Sequence[PlannedModel]) -> None:
        self._models = models
        self._styles = {name: style for model in models for name, style in model.styles.items()}
        self._modules = {name: module for model in models for name, module in model.modules()}
        self._is_masked = "ep_router" in self._styles.values()
        self._experts = {name: m for name, m in self._modules.items() if has_experts(m)}
        inside_experts = {m for outer in self._experts.values() for m in outer.modules() if m is not outer}
        self._unwatched = frozenset(name for name, module in self._modules.items() if module in inside_experts)

    def __bool__(self) -> bool:
        return bool(self._models)

    def meshes(self) -> list[DeviceMesh]:
        """List the meshes that the models were loaded onto."""
        return [mesh for model in self._models for mesh in model.meshes()]

    def distributing_axes(self, mesh: Mesh) -> frozenset[str]:
        """Return ep if ranks along it have different experts: dispatched tokens return before a module ends."""
        is_dispatched = "ep_dispatch_experts" in self._styles.values()
        return frozenset({EXPERT_AXIS} & set(mesh.sizes)) if is_dispatched else frozenset()

    def is_watched(self, name: str) -> bool:
        """Return whether a module is traced. Modules inside experts are not, because dispatch determines their rows."""
        return name not in self._unwatched

    def notes(self) -> list[str]:
        if not self._experts:
            return []
        return [
            f"the modules inside {len(self._experts)} experts modules are not traced, only their inputs and outputs"
        ]

    def find_rule(self, site: Site, mesh: Mesh) -> Rule | None:
        """Find the layout of an activation, if a plan states it."""
        style = self._styles.get(site.name)
        if style is None or mesh.sizes.get(TP_AXIS, 1) == 1:
            return None
        layouts = _MASKED_EXPERTS if style == "moe_tp_experts" and self._is_masked else _STYLES.get(style, {})
        for kind in (site.kind, site.kind.primal):
            for key in (f"{kind}.{site.slot}", str(kind)):
                if key in layouts:
                    layout = Layout.parse(layouts[key])
                    stated = layout if kind is site.kind else layout.without_pending()
                    return Rule(
                        f"{_generalize_name(site.name)}/{key}", stated, f"transformers: {style}", LayoutSource.ADAPTER
                    )
        return None

    def mask_values(self, site: Site, tensor: torch.Tensor, coord: Coord) -> torch.Tensor:
        """Return the values as they count in the pending sum at this site."""
        style = self._styles.get(site.name)
        if style is None or TP_AXIS not in coord:
            return tensor
        if self._is_masked and (style, site.kind, site.slot) in _CHOSEN_EXPERTS:
            # Number the experts as in the whole model; zero for experts of other ranks.
            num_local = next(iter(self._experts.values())).num_experts
            return torch.where(tensor < num_local, tensor + coord[TP_AXIS] * num_local, 0)
        if style == "mla_kv_a_proj" and site.kind is Kind.GRAD_OUTPUT and coord[TP_AXIS] > 0:
            # The rotated part is a sum; the rest is replicated and counts once.
            rotated = self._modules[site.name].config.qk_rope_head_dim
            return torch.cat([torch.zeros_like(tensor[..., :-rotated]), tensor[..., -rotated:]], dim=-1)
        return tensor


def find_models(chunks: Sequence[nn.Module]) -> PlannedModels:
    """Find the outermost transformers models in these modules; the result is false if there are none."""
    models: list[PlannedModel] = []
    for chunk in chunks:
        outermost: list[str] = []
        for path, module in chunk.named_modules():
            if _is_model(module) and not any(_is_inside(path, outer) for outer in outermost):
                outermost.append(path)
                models.append(PlannedModel.at(path, chunk, module))
    return PlannedModels(models)


def find_device_mesh(model: nn.Module) -> DeviceMesh | None:
    """Find the device mesh that a model was loaded onto, even if no parameter is distributed over it.

    `PreTrainedModel._device_mesh`, in 5.22. Without it the mesh is that of the parameters, and a model whose plan
    distributes no parameter has none.
    """
    mesh = getattr(model, "_device_mesh", None)
    return mesh if isinstance(mesh, DeviceMesh) else None


def has_experts(module: nn.Module) -> bool:
    """Return whether a module computes several experts: `_is_expert_parallel`, in 5.22.

    The decorator of all experts' classes sets it. Without it modules inside experts are traced, whose rows have a
    different order.
    """
    return hasattr(module, "_is_expert_parallel")


def _is_model(module: nn.Module) -> bool:
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__)


def _read_applied_plans(module: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Read the tensor-parallel and the expert-parallel plan; a plan that was not applied is empty."""
    config = getattr(module.config, "distributed_config", None)
    tp_plan = module.tp_plan if getattr(config, "tp_size", 1) > 1 else {}
    ep_plan = module.ep_plan if getattr(config, "ep_size", 1) > 1 else {}
    return dict(tp_plan), dict(ep_plan)


def _generalize_name(name: str) -> str:
    """Write a module's name as plans do: layers.* for layers.3."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")
