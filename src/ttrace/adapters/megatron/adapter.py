"""Adapter for models built from Megatron-core.

`watch_losses` reports auxiliary losses, which a router adds to its own gradient beside the model's loss. The schedule
scales all losses, so their weight is known only in backward. The loss times its own gradient is recorded: it is the
summand of the objective that its gradients belong to.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.adapter import Adapter, FrameworkEvents, Handle, Optimizer, OwnedSlice, Recall, Share
from ttrace.adapters.megatron import layouts, schedule
from ttrace.adapters.megatron import optimizer as megatron_optimizer
from ttrace.adapters.megatron.experts import ExpertPlace, TokenDispatch
from ttrace.adapters.megatron.layouts import Module
from ttrace.adapters.megatron.names import TIED, ChunkNames, find_disagreements, read_checkpoint, read_mesh
from ttrace.errors import CaptureError
from ttrace.layouts.ids import ROOT, Kind, Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import LayoutSource, Placement
from ttrace.layouts.rules import Rule
from ttrace.patches import Patches, SharedPatches

_ORIGIN = "megatron"
"""The origin that messages show for rules of this adapter."""
_SCALARS = frozenset({Kind.GRAD_NORM, Kind.CLIP})
_DISTRIBUTING = ("pp", "dp", "edp", "ep")
_REDUCED = ("dp", "cp", "edp")
"""The axes over which Megatron's DDP reduces the gradients of dense parameters (dp, cp) and of experts (edp)."""

_events: WeakSet[FrameworkEvents] = WeakSet()
"""The receivers of auxiliary losses."""


class Megatron(Adapter):
    """Adapter for a Megatron model, its process groups, schedules and optimizer."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        *,
        mesh: object = None,
    ) -> None:
        if mesh is not None:
            raise CaptureError(
                f'attach(mesh="{mesh}"): the mesh of a Megatron model is read from Megatron\'s process groups, so it '
                "cannot be given. Leave mesh= out, and set the sizes in parallel_state.initialize_model_parallel."
            )
        self.chunks = chunks
        self._optimizer = optimizer
        self._config = _find_config(chunks)
        self.mesh = read_mesh(has_experts=bool(getattr(self._config, "num_moe_experts", None)))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coord = self.mesh.coord(self.rank)
        self._names = {chunk: ChunkNames(chunk, self.coord.get("ep", 0)) for chunk in chunks}
        self._modules = {name: at for chunk in chunks for name, at in self._find_modules(chunk)}
        self._rules: dict[tuple[Site, int], Rule | None] = {}
        self._events: FrameworkEvents | None = None
        self._unreadable = ""
        self._checkpoints = {chunk: self._read_checkpoint(chunk) for chunk in chunks}

    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:
        if "megatron.core" not in sys.modules:
            return False  # only a script that uses Megatron has loaded it
        modules = (module for chunk in chunks for module in chunk.modules())
        return any(kind.__name__ == "MegatronModule" for module in modules for kind in type(module).__mro__)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        return ("dp",) if "dp" in self.mesh.sizes else ()

    @cached_property
    def distributing_axes(self) -> frozenset[str]:
        return frozenset(_DISTRIBUTING) & set(self.mesh.sizes)

    @cached_property
    def reduced_axes(self) -> frozenset[str]:
        is_wrapped = all(hasattr(chunk, "finish_grad_sync") for chunk in self.chunks)
        return frozenset(_REDUCED) & set(self.mesh.sizes) if is_wrapped else frozenset()

    @cached_property
    def grad_factor(self) -> float:
        """The factor of Megatron's DDP, which averages over all ranks with data, unless the loss is per token."""
        if getattr(self._config, "calculate_per_token_loss", False):
            return 1.0
        return 1.0 / (self.mesh.sizes.get("dp", 1) * self.mesh.sizes.get("cp", 1))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if any(map(_groups_experts, self._modules.values())):
            notes.append(
                "the modules inside grouped experts are not traced, only the inputs and outputs of their layer"
            )
        if self._reduces_early:
            notes.append("main gradients before reduction are not traced: reduction overlaps with backward")
        if self._gathers_late:
            notes.append(
                "updated parameters are recorded as each rank's own part: gathering overlaps with the next forward"
            )
        if self._unreadable:
            notes.append(f"parameter layouts could not be cross-checked with sharded_state_dict: {self._unreadable}")
        return tuple(notes)

    def name(self, chunk: nn.Module, path: str) -> str:
        return self._names[chunk].name(path)

    @cached_property
    def divided(self) -> frozenset[str]:
        return frozenset().union(*(naming.divided for naming in self._names.values()))

    @cached_property
    def untraced(self) -> frozenset[Kind]:
        return frozenset({Kind.MAIN_GRAD}) if self._reduces_early else frozenset()

    def is_watched(self, name: str, *, isolated: bool) -> bool:
        at = self._modules[name]
        # The tokens in the rows of a single expert are known, but not those of the module that contains all experts.
        is_known = ExpertPlace.of(name) is not None and not isolated
        return not layouts.is_transparent(at) and (is_known or not at.is_in_expert)

    def attach(self, events: FrameworkEvents) -> None:
        self._events = events
        if getattr(self._config, "num_moe_experts", None):
            watch_losses(events, self.patches)
        for chunk in self.chunks:
            model: Any = _unwrap(chunk)
            is_first, is_last = getattr(model, "pre_process", True), getattr(model, "post_process", True)
            schedule.watch_chunk(chunk, events, self.patches, is_first=is_first, is_last=is_last)
            if hasattr(chunk, "finish_grad_sync") and not self._reduces_early:
                self.patches.wrap(chunk, "finish_grad_sync", partial(self._wrap_grad_sync, events, chunk))

    def find_rule(self, site: Site, num_dims: int) -> Rule | None:
        key = (site, num_dims)
        if key not in self._rules:
            text = self._find_layout(site, num_dims)
            self._rules[key] = None if text is None else _make_rule(site, text)
        return self._rules[key]

    def split_rows(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:
        place = ExpertPlace.of(site.name)
        if place is None or self.mesh.num_ranks == 1:
            return None
        return list(self._dispatch.split_rows(self._modules[site.name], place, site.kind, tensor, number, recall))

    def find_disagreements(self, parameters: Mapping[str, Placement]) -> Iterator[str]:
        # Layers with a rule of the user are skipped: their part of the checkpoint may not be implemented.
        ours = {
            name: placement.region for name, placement in parameters.items() if placement.source is LayoutSource.ADAPTER
        }
        for chunk in self.chunks:
            model = _unwrap(chunk)
            depth = next(path for path, module in chunk.named_modules() if module is model)
            names = {path: self.name(chunk, f"{depth}.{path}") for path, _ in model.named_parameters()}
            known = {path: ours[name] for path, name in names.items() if name in ours and not _is_grouped(name)}
            yield from find_disagreements(model, self._checkpoints[chunk], known)

    def on_parameters_replaced(self, optimizer: Optimizer | None) -> None:
        for part in megatron_optimizer.list_parts(optimizer):
            part.reload_model_params()

    def find_torch_optimizers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        return [part.optimizer for part in megatron_optimizer.list_parts(optimizer)]

    def find_groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Mapping[str, object]]]:
        return megatron_optimizer.find_groups(optimizer, parameters)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[Optimizer | None], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        assert self._events is not None, "attach comes first"
        return [megatron_optimizer.watch_steps(optimizer, self._events, before, after)]

    def read_values(self, parameter: nn.Parameter) -> OwnedSlice:
        return OwnedSlice(self._reshape(parameter, parameter.detach()))

    def read_gradient(self, parameter: nn.Parameter) -> OwnedSlice | None:
        gradient: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        run = megatron_optimizer.find_run(self._optimizer, parameter)
        if gradient is None or not parameter.requires_grad or (run is not None and run[0] == run[1]):
            return None
        return (
            OwnedSlice(self._reshape(parameter, gradient))
            if run is None
            else OwnedSlice(gradient.view(-1)[slice(*run)], run)
        )

    def read_updated(self, parameter: nn.Parameter) -> OwnedSlice | None:
        run = megatron_optimizer.find_run(self._optimizer, parameter) if self._gathers_late else None
        if run is None:
            return self.read_values(parameter)
        return OwnedSlice(parameter.detach().view(-1)[slice(*run)], run) if run[0] < run[1] else None

    def read_optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
        slices = megatron_optimizer.read_state(optimizer, parameter)
        return {
            key: OwnedSlice(self._reshape(parameter, owned.tensor)) if owned.run is None else owned
            for key, owned in slices.items()
        }

    def _find_layout(self, site: Site, num_dims: int) -> str | None:
        if site.kind in _SCALARS:
            return ""
        if site.kind is Kind.LOSS:
            return "+cp" if site.name == ROOT else layouts.auxiliary(sequence_parallel=self._is_sequence_parallel)
        if site.kind.is_of_buffer:
            return "..."
        if site.kind.is_of_param:
            return self._find_parameter_layout(site)
        if site.kind is Kind.DECISION:
            return layouts.decision(sequence_parallel=self._is_routing_cut)
        at = self._modules.get(site.name)
        if at is None or at.is_in_expert:
            return None
        is_routing = at.attribute == "router" and site.kind.primal is Kind.OUTPUT
        is_cut = self._is_routing_cut if is_routing else self._is_sequence_parallel
        text = layouts.activation(at, site.kind.primal, site.slot, num_dims, sequence_parallel=is_cut)
        # If all tp ranks route all tokens, each rank has the gradient of its own columns.
        is_summand = is_routing and self._is_sequence_parallel and not is_cut and site.kind is Kind.GRAD_OUTPUT
        return f"{text} +tp" if is_summand else text

    def _find_parameter_layout(self, site: Site) -> str:
        at, attribute = self._owners[site.name]
        text = layouts.parameter(at, attribute, expert_tp="etp" if "etp" in self.mesh.sizes else "tp")
        if site.kind is not Kind.MAIN_GRAD:
            return text
        is_tied = site.name == TIED[1] and self._is_tied and self.mesh.sizes.get("pp", 1) > 1
        missing = layouts.pending(at, text, is_tied=is_tied, sequence_parallel=self._is_sequence_parallel)
        return f"{text} {missing}"

    @property
    def _is_sequence_parallel(self) -> bool:
        return bool(getattr(self._config, "sequence_parallel", False)) and self.mesh.sizes.get("tp", 1) > 1

    @property
    def _is_routing_cut(self) -> bool:
        return self._is_sequence_parallel and not layouts.routes_whole(self._config)

    @cached_property
    def _is_tied(self) -> bool:
        return bool(getattr(_unwrap(self.chunks[0]), "share_embeddings_and_output_weights", False))

    @cached_property
    def _reduces_early(self) -> bool:
        return self._ddp_has("overlap_grad_reduce")

    @cached_property
    def _gathers_late(self) -> bool:
        """Whether other ranks' parts of a parameter are gathered only in the next forward."""
        return self._ddp_has("overlap_param_gather")

    def _ddp_has(self, option: str) -> bool:
        return any(getattr(getattr(chunk, "ddp_config", None), option, False) for chunk in self.chunks)

    @cached_property
    def _owners(self) -> dict[str, tuple[Module, str]]:
        """For each parameter, by name, the module that contains it and its attribute there."""
        owners = {}
        for chunk in self.chunks:
            for path, _ in chunk.named_parameters(remove_duplicate=False):
                owner, _, attribute = path.rpartition(".")
                owners[self.name(chunk, path)] = self._modules[self.name(chunk, owner)], attribute
        return owners

    def _find_modules(self, chunk: nn.Module) -> Iterator[tuple[str, Module]]:
        by_path = dict(chunk.named_modules())
        for path, module in by_path.items():
            owner, _, attribute = path.rpartition(".")
            parts = path.split(".")
            at = Module(module, attribute, by_path[owner], is_in_expert="experts" in parts)
            yield self.name(chunk, path), at

    def _read_checkpoint(self, chunk: nn.Module) -> Mapping[str, Any]:
        try:
            return read_checkpoint(_unwrap(chunk))
        except Exception as error:  # this runs the candidate's code, whose failure must not end the run
            self._unreadable = f"{type(error).__name__}: {error}"
            return {}

    @cached_property
    def _dispatch(self) -> TokenDispatch:
        gathers = getattr(self._config, "moe_token_dispatcher_type", "") == "allgather"
        return TokenDispatch(self.mesh, self.coord, gathers=gathers, sequence_parallel=self._is_sequence_parallel)

    @cached_property
    def _shapes(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """The shapes of weights that contain several experts."""
        grouped = [at.module for at in self._modules.values() if _groups_experts(at)]
        owned = ((p, module) for module in grouped for p in module.parameters(recurse=False))
        return {p: layouts.find_grouped_shape(p, module) for p, module in owned}

    def _reshape(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        shape = self._shapes.get(parameter)
        return tensor.view(shape) if shape is not None and tensor.shape == parameter.shape else tensor

    def _wrap_grad_sync(self, events: FrameworkEvents, chunk: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def finish_grad_sync(*args: Any, **kwargs: Any) -> Any:
            gradients = ((p, getattr(p, "main_grad", None)) for p in chunk.parameters() if p.requires_grad)
            events.on_main_gradients((p, self._reshape(p, g)) for p, g in gradients if g is not None)
            return own(*args, **kwargs)

        return finish_grad_sync


def watch_losses(events: FrameworkEvents, patches: Patches) -> None:
    """Report every auxiliary loss when it is added to the gradient, until the patches are removed."""
    _shared.acquire()
    patches.on_remove(_shared.release)
    _events.add(events)
    patches.on_remove(functools.partial(_events.discard, events))


def _install(patches: Patches) -> None:
    functions: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    patches.wrap(functions.MoEAuxLossAutoScaler, "apply", _wrap_apply)


_shared = SharedPatches(_install)


def _wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def scale(output: torch.Tensor, loss: torch.Tensor) -> Any:
        for events in _events:
            events.on_auxiliary_loss(loss)
        return apply(output, loss)

    return scale


def _make_rule(site: Site, text: str) -> Rule:
    return Rule(str(site), Layout.parse(text), _ORIGIN, LayoutSource.ADAPTER)


def _groups_experts(at: Module) -> bool:
    """Return whether one module contains several experts in its own weights."""
    module = at.module
    return at.attribute == "experts" and hasattr(module, "num_local_experts") and not hasattr(module, "local_experts")


def _is_grouped(name: str) -> bool:
    """Return whether a parameter may contain several experts."""
    return ".experts." in name and ExpertPlace.of(name) is None


def _unwrap(chunk: nn.Module) -> nn.Module:
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _find_config(chunks: Sequence[nn.Module]) -> Any:
    config = next((c for chunk in chunks for m in chunk.modules() if (c := getattr(m, "config", None))), None)
    if config is None:
        raise CaptureError("no module of this Megatron model has a config. Pass the model itself to attach.")
    return config
