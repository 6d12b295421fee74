"""This module is the adapter for models built from Megatron-core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttrace.adapters.adapter import Handle, Listener, Optimizer, Piece, Recall, Share
from ttrace.adapters.megatron import auxiliary_losses, checkpoints, layouts, ranks, schedule
from ttrace.adapters.megatron import optimizer as megatron_optimizer
from ttrace.adapters.megatron.experts import Dispatch, Place
from ttrace.adapters.megatron.layouts import Module
from ttrace.adapters.megatron.names import TIED, Naming
from ttrace.errors import CaptureError
from ttrace.layouts.layout import Layout
from ttrace.layouts.placed import Placed
from ttrace.layouts.rules import Rule
from ttrace.layouts.source import LayoutSource
from ttrace.tensors.ids import ROOT, Kind, Site
from ttrace.tensors.mesh import Coord

_ORIGIN = "megatron"
"""Who states the layouts that come from here."""
_SCALARS = frozenset({Kind.GRAD_NORM, Kind.CLIP})
_DISTRIBUTING = ("pp", "dp", "edp", "ep")
_REDUCED = ("dp", "cp", "edp")
"""The axes over which Megatron's DDP reduces: those of dense parameters, and that of experts."""


def is_megatron(chunks: Sequence[nn.Module]) -> bool:
    """Whether these are chunks of a Megatron model; only a script that uses it has it loaded."""
    if "megatron.core" not in sys.modules:
        return False
    modules = (module for chunk in chunks for module in chunk.modules())
    return any(kind.__name__ == "MegatronModule" for module in modules for kind in type(module).__mro__)


class Megatron:
    """Everything that a Megatron model, its groups, schedules and optimizer say of themselves."""

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
        self.chunks = chunks
        self._optimizer = optimizer
        self._config = _config(chunks)
        self.mesh = ranks.mesh(has_experts=bool(getattr(self._config, "num_moe_experts", None)))
        self.coord: Coord = self.mesh.coord(dist.get_rank() if dist.is_initialized() else 0)
        self._naming = {chunk: Naming(chunk, self.coord.get("ep", 0)) for chunk in chunks}
        self._modules = {name: at for chunk in chunks for name, at in self._found(chunk)}
        self._rules: dict[tuple[Site, int], Rule | None] = {}
        self._listener: Listener | None = None
        self._unreadable = ""
        self._checkpoints = {chunk: self._checkpoint(chunk) for chunk in chunks}

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
        """Megatron's DDP averages over all ranks that have data, unless the loss is counted by token."""
        if getattr(self._config, "calculate_per_token_loss", False):
            return 1.0
        return 1.0 / (self.mesh.sizes.get("dp", 1) * self.mesh.sizes.get("cp", 1))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if any(map(_groups_experts, self._modules.values())):
            notes.append("the insides of grouped experts are not traced, only what enters and leaves their layer")
        if self._reduces_early:
            notes.append("main gradients before reduction are not traced: reduction overlaps with backward")
        if self._gathers_late:
            notes.append("of updated parameters each rank shows its own part: gathering overlaps with the next forward")
        if self._unreadable:
            notes.append(f"parameters' layouts were not held against sharded_state_dict: {self._unreadable}")
        return tuple(notes)

    def name(self, chunk: nn.Module, path: str) -> str:
        return self._naming[chunk].name(path)

    @cached_property
    def divided(self) -> frozenset[str]:
        return frozenset().union(*(naming.divided for naming in self._naming.values()))

    @cached_property
    def untraced(self) -> frozenset[Kind]:
        return frozenset({Kind.MAIN_GRAD}) if self._reduces_early else frozenset()

    def watches(self, name: str, *, isolated: bool) -> bool:
        at = self._modules[name]
        # Which tokens lie in which rows is known of single experts, not of what holds them all.
        is_known = Place.of(name) is not None and not isolated
        return not layouts.is_transparent(at) and (is_known or not at.is_in_expert)

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        if getattr(self._config, "num_moe_experts", None):
            auxiliary_losses.listen(listener)
        for chunk in self.chunks:
            model: Any = _unwrapped(chunk)
            is_first, is_last = getattr(model, "pre_process", True), getattr(model, "post_process", True)
            schedule.listen(chunk, listener, is_first=is_first, is_last=is_last)
            if hasattr(chunk, "finish_grad_sync") and not self._reduces_early:
                _tell_before(chunk, "finish_grad_sync", partial(self._tell_main_gradients, chunk))

    def placed(self, tensor: torch.Tensor) -> Placed | None:  # noqa: ARG002
        return None

    def rule(self, site: Site, num_dims: int) -> Rule | None:
        key = (site, num_dims)
        if key not in self._rules:
            text = self._layout(site, num_dims)
            self._rules[key] = None if text is None else _rule(site, text)
        return self._rules[key]

    def shares(self, site: Site, tensor: torch.Tensor, number: int, recall: Recall) -> Sequence[Share] | None:
        place = Place.of(site.name)
        if place is None or self.mesh.num_ranks == 1:
            return None
        return list(self._dispatch.shares(self._modules[site.name], place, site.kind, tensor, number, recall))

    def disagreements(self, parameters: Mapping[str, Placed]) -> Iterator[str]:
        # Who gives a rule for a layer of their own may not have written its part of the checkpoint.
        ours = {name: placed.region for name, placed in parameters.items() if placed.source is LayoutSource.ADAPTER}
        for chunk in self.chunks:
            model = _unwrapped(chunk)
            depth = next(path for path, module in chunk.named_modules() if module is model)
            names = {path: self.name(chunk, f"{depth}.{path}") for path, _ in model.named_parameters()}
            known = {path: ours[name] for path, name in names.items() if name in ours and not _is_grouped(name)}
            yield from checkpoints.disagreements(model, self._checkpoints[chunk], known)

    def parameters_replaced(self, optimizer: Optimizer | None) -> None:
        for part in megatron_optimizer.parts(optimizer):
            part.reload_model_params()

    def steppers(self, optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
        return [part.optimizer for part in megatron_optimizer.parts(optimizer)]

    def groups(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, Mapping[str, object]]]:
        return megatron_optimizer.groups(optimizer, parameters)

    def watch_steps(
        self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]
    ) -> Sequence[Handle]:
        assert self._listener is not None, "listen comes first"
        return [megatron_optimizer.Watch(optimizer, self._listener, before, after)]

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._shaped(parameter, parameter.detach())

    def gradient(self, parameter: nn.Parameter) -> Piece | None:
        gradient: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
        run = megatron_optimizer.run_of(self._optimizer, parameter)
        if gradient is None or not parameter.requires_grad or (run is not None and run[0] == run[1]):
            return None
        return Piece(self._shaped(parameter, gradient)) if run is None else Piece(gradient.view(-1)[slice(*run)], run)

    def updated(self, parameter: nn.Parameter) -> Piece | None:
        run = megatron_optimizer.run_of(self._optimizer, parameter) if self._gathers_late else None
        if run is None:
            return Piece(self.values(parameter))
        return Piece(parameter.detach().view(-1)[slice(*run)], run) if run[0] < run[1] else None

    def optimizer_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Piece]:
        pieces = megatron_optimizer.state(optimizer, parameter)
        return {
            key: Piece(self._shaped(parameter, piece.tensor)) if piece.run is None else piece
            for key, piece in pieces.items()
        }

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def local(self, tensor: torch.Tensor, site: Site | None = None) -> torch.Tensor:  # noqa: ARG002
        return tensor

    def with_local(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return local

    def _layout(self, site: Site, num_dims: int) -> str | None:
        if site.kind in _SCALARS:
            return ""
        if site.kind is Kind.LOSS:
            return "+cp" if site.name == ROOT else layouts.auxiliary(sequence_parallel=self._is_sequence_parallel)
        if site.kind.is_of_buffer:
            return "..."
        if site.kind.is_of_param:
            return self._parameter_layout(site)
        if site.kind is Kind.DECISION:
            return layouts.decision(sequence_parallel=self._is_routing_cut)
        at = self._modules.get(site.name)
        if at is None or at.is_in_expert:
            return None
        is_routing = at.attribute == "router" and site.kind.primal is Kind.OUTPUT
        is_cut = self._is_routing_cut if is_routing else self._is_sequence_parallel
        text = layouts.activation(at, site.kind.primal, site.slot, num_dims, sequence_parallel=is_cut)
        # Where all ranks of tp route all tokens, each has the gradient of its own columns of them.
        is_summand = is_routing and self._is_sequence_parallel and not is_cut and site.kind is Kind.GRAD_OUTPUT
        return f"{text} +tp" if is_summand else text

    def _parameter_layout(self, site: Site) -> str:
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
        return bool(getattr(_unwrapped(self.chunks[0]), "share_embeddings_and_output_weights", False))

    @cached_property
    def _reduces_early(self) -> bool:
        return self._ddp_has("overlap_grad_reduce")

    @cached_property
    def _gathers_late(self) -> bool:
        """Whether other ranks' parts of a parameter only come with the next forward."""
        return self._ddp_has("overlap_param_gather")

    def _ddp_has(self, option: str) -> bool:
        return any(getattr(getattr(chunk, "ddp_config", None), option, False) for chunk in self.chunks)

    @cached_property
    def _owners(self) -> dict[str, tuple[Module, str]]:
        """By parameter, the module that holds it and the attribute under which it does."""
        found = {}
        for chunk in self.chunks:
            for path, _ in chunk.named_parameters(remove_duplicate=False):
                owner, _, attribute = path.rpartition(".")
                found[self.name(chunk, path)] = self._modules[self.name(chunk, owner)], attribute
        return found

    def _found(self, chunk: nn.Module) -> Iterator[tuple[str, Module]]:
        by_path = dict(chunk.named_modules())
        for path, module in by_path.items():
            owner, _, attribute = path.rpartition(".")
            parts = path.split(".")
            at = Module(module, attribute, by_path[owner], is_in_expert="experts" in parts)
            yield self.name(chunk, path), at

    def _checkpoint(self, chunk: nn.Module) -> Mapping[str, Any]:
        try:
            return checkpoints.saved(_unwrapped(chunk))
        except Exception as error:  # the candidate's own code, for which nothing may fail here
            self._unreadable = f"{type(error).__name__}: {error}"
            return {}

    @cached_property
    def _dispatch(self) -> Dispatch:
        gathers = getattr(self._config, "moe_token_dispatcher_type", "") == "allgather"
        return Dispatch(self.mesh, self.coord, gathers=gathers, sequence_parallel=self._is_sequence_parallel)

    @cached_property
    def _shapes(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """The shapes of weights that hold several experts one after the other."""
        grouped = [at.module for at in self._modules.values() if _groups_experts(at)]
        owned = ((p, module) for module in grouped for p in module.parameters(recurse=False))
        return {p: layouts.grouped_shape(p, module) for p, module in owned}

    def _shaped(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        shape = self._shapes.get(parameter)
        return tensor.view(shape) if shape is not None and tensor.shape == parameter.shape else tensor

    def _tell_main_gradients(self, chunk: nn.Module) -> None:
        assert self._listener is not None
        gradients = ((p, getattr(p, "main_grad", None)) for p in chunk.parameters() if p.requires_grad)
        self._listener.sees_main_gradients((p, self._shaped(p, g)) for p, g in gradients if g is not None)


def _rule(site: Site, text: str) -> Rule:
    return Rule(str(site), Layout.parse(text), _ORIGIN, LayoutSource.ADAPTER)


def _groups_experts(at: Module) -> bool:
    """Whether one module holds several experts in weights of its own."""
    module = at.module
    return at.attribute == "experts" and hasattr(module, "num_local_experts") and not hasattr(module, "local_experts")


def _is_grouped(name: str) -> bool:
    """Whether a parameter may hold several experts."""
    return ".experts." in name and Place.of(name) is None


def _tell_before(owner: Any, method: str, tell: Callable[[], None]) -> None:
    own = getattr(owner, method)

    def told(*args: Any, **kwargs: Any) -> Any:
        tell()
        return own(*args, **kwargs)

    setattr(owner, method, told)


def _unwrapped(chunk: nn.Module) -> nn.Module:
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _config(chunks: Sequence[nn.Module]) -> Any:
    config = next((c for chunk in chunks for m in chunk.modules() if (c := getattr(m, "config", None))), None)
    if config is None:
        raise CaptureError("no module of this Megatron model has a config. Give attach the model itself.")
    return config
