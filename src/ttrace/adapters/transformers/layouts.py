"""Layouts of transformers models, as a model's own plans state them for its activations.

Under a plan parameters are DTensors, but modules take and return plain tensors: the plan replaces their `forward` by
one that distributes the inputs and gathers the outputs. So the layouts of activations come from the plan's styles.
transformers itself is never imported here: a model has its plans with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.transformers.compat import find_device_mesh, has_experts
from ttrace.adapters.wrappers import find_canonical_name
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Coord, Mesh
from ttrace.layouts.rules import Rule
from ttrace.layouts.source import LayoutSource

TP_AXIS, EXPERT_AXIS = "tp", "ep"
"""The names in transformers of the axis of its plans, and of the axis that dispatched experts lie along."""

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
    # Each rank keeps the scores of its own experts and has zeros elsewhere; gradients of scores are whole.
    "ep_router": {
        "input": _WHOLE,
        "output": _WHOLE,
        f"output.{_SCORES}": _SUM,
        f"output.{_INDICES}": _SUM,
    },
}
"""By style, the layouts of what enters and leaves a module. Other styles state nothing."""
_MASKED_EXPERTS = {
    "input": _WHOLE,
    "input.1": _SUM,
    "input.2": _SUM,
    "output": _WHOLE,
}
"""The layouts of experts behind an `ep_router`, which get its outputs."""


_CHOSEN_EXPERTS = {("ep_router", Kind.OUTPUT, _INDICES), ("moe_tp_experts", Kind.INPUT, "1")}
"""Style, kind and slot of the indices of chosen experts, which a masking router numbers from 0 on every rank."""


@dataclass(frozen=True)
class PlannedModel:
    """A transformers model somewhere in the attached modules, with the plans that were applied to it."""

    names: Mapping[str, str]
    """By path in this model, the canonical name of each module."""
    module: nn.Module
    styles: Mapping[str, str]
    """The style of each module, by the module's canonical name."""

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
        """Yield the mesh that the model was loaded onto, even if no parameter lies on it."""
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
        """Return ep if ranks along it have experts of their own: dispatched tokens return before a module ends."""
        is_dispatched = "ep_dispatch_experts" in self._styles.values()
        return frozenset({EXPERT_AXIS} & set(mesh.sizes)) if is_dispatched else frozenset()

    def is_watched(self, name: str) -> bool:
        """Whether a module is traced. One inside experts is not: the kernel or the dispatch decides its rows."""
        return name not in self._unwatched

    def notes(self) -> list[str]:
        if not self._experts:
            return []
        return [f"the insides of {len(self._experts)} experts modules are not traced, only what enters and leaves them"]

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
        """Return the values as they count in the sum that the rule for this site states."""
        style = self._styles.get(site.name)
        if style is None or TP_AXIS not in coord:
            return tensor
        if self._is_masked and (style, site.kind, site.slot) in _CHOSEN_EXPERTS:
            # The experts' numbers in the model, and zero for experts of another rank.
            num_local = next(iter(self._experts.values())).num_experts
            return torch.where(tensor < num_local, tensor + coord[TP_AXIS] * num_local, 0)
        if style == "mla_kv_a_proj" and site.kind is Kind.GRAD_OUTPUT and coord[TP_AXIS] > 0:
            # The rotated part is a sum; the rest is whole on every rank and counts once.
            rotated = self._modules[site.name].config.qk_rope_head_dim
            return torch.cat([torch.zeros_like(tensor[..., :-rotated]), tensor[..., -rotated:]], dim=-1)
        return tensor


def find_models(chunks: Sequence[nn.Module]) -> PlannedModels:
    """Find the outermost transformers models in these modules; the result is false if there is none."""
    models: list[PlannedModel] = []
    for chunk in chunks:
        outermost: list[str] = []
        for path, module in chunk.named_modules():
            if _is_model(module) and not any(_is_inside(path, outer) for outer in outermost):
                outermost.append(path)
                models.append(PlannedModel.at(path, chunk, module))
    return PlannedModels(models)


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
