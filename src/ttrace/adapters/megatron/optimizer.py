"""Megatron's optimizers: main gradients, the pieces that a rank owns, the norm and the clipping."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ttrace.adapters.adapter import FrameworkEvents, Optimizer, OwnedSlice, read_groups
from ttrace.adapters.megatron.schedule import read_owned_range
from ttrace.layouts.ids import MAIN_PARAM
from ttrace.patches import Patches


def watch_steps(
    optimizer: Optimizer, events: FrameworkEvents, before: Callable[[Optimizer | None], None], after: Callable[[], None]
) -> Patches:
    """Call `before` and `after` around each step, and report its norm and clipping, until the patches are removed."""
    functions = importlib.import_module("megatron.core.optimizer.optimizer")

    def wrap(own_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            before(None)
            clipping = Patches()
            if hasattr(functions, "clip_grad_by_total_norm_fp32"):
                clipping.wrap(functions, "clip_grad_by_total_norm_fp32", partial(_wrap_clip, events))
            try:
                result = own_step(*args, **kwargs)
            finally:
                clipping.remove()
            norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            if norm is not None:
                events.on_grad_norm(torch.tensor(float(norm), dtype=torch.float32, device="cpu"))
            after()
            return result

        return step

    patches = Patches()
    patches.wrap(optimizer, "step", wrap)
    return patches


def _wrap_clip(events: FrameworkEvents, own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> Any:
        factor = min(1.0, max_norm / (float(total_norm) + 1e-6))
        events.on_clip(torch.tensor(factor, dtype=torch.float32, device="cpu"))
        return own(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def list_parts(optimizer: Optimizer | None) -> Iterator[Any]:
    """List the optimizers in a chained optimizer, or the optimizer itself."""
    if optimizer is not None:
        yield from getattr(optimizer, "chained_optimizers", [optimizer])


def find_run(optimizer: Optimizer | None, parameter: nn.Parameter) -> tuple[int, int] | None:
    """Find the run of a parameter's values that this rank owns; None if the optimizer is not distributed.

    The run is empty if this rank does not own any of them.
    """
    distributed = [part for part in list_parts(optimizer) if hasattr(part, "model_param_gbuf_map")]
    for part in distributed:
        where = part.model_param_gbuf_map.get(parameter)
        if where is not None:
            return read_owned_range(part, parameter)
    return (0, 0) if distributed else None


def find_groups(
    optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Mapping[str, object]]]:
    """Find the parameters that this rank updates, each with its group; the optimizer itself has copies of them."""
    wanted = list(parameters)
    for part in list_parts(optimizer):
        places = getattr(part, "model_param_group_index_map", None)
        if places is not None:
            yield from ((p, part.optimizer.param_groups[places[p][0]]) for p in wanted if p in places)
            continue
        known = {id(copy): group for group in read_groups(part.optimizer) for copy in group["params"]}
        for parameter in wanted:
            group = known.get(id(_find_main_copy(part, parameter)))
            if group is not None:
                yield parameter, group


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, OwnedSlice]:
    """Read what this rank keeps for a parameter: the moments, and the optimizer's own copy of the parameter."""
    for part in list_parts(optimizer):
        groups = getattr(part, "model_param_group_index_map", None)
        if groups is not None:
            if parameter in groups:
                group, order = groups[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                return _make_slices(part, parameter, main, find_run(part, parameter))
        else:
            main = _find_main_copy(part, parameter)
            if main in part.optimizer.state:
                return _make_slices(part, parameter, main, None)
    return {}


def _find_main_copy(part: Any, parameter: nn.Parameter) -> torch.Tensor:
    """Find the copy that the optimizer updates in place of a parameter; before 0.9 there was no reference to it."""
    main: torch.Tensor = getattr(parameter, "main_param", parameter)
    if main is parameter:
        groups = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
        copies = (copy for own, copied in groups for model, copy in zip(own, copied, strict=True) if model is parameter)
        main = next(copies, main)
    return main


def _make_slices(
    part: Any, parameter: nn.Parameter, main: torch.Tensor, run: tuple[int, int] | None
) -> dict[str, OwnedSlice]:
    own = {MAIN_PARAM: main} if main.dtype != parameter.dtype else {}
    state = {**own, **part.optimizer.state.get(main, {})}
    return {
        str(key): OwnedSlice(value.detach(), run if value.shape == main.shape else None)
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
