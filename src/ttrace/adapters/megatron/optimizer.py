"""This module reads Megatron's optimizers: main gradients, the pieces that a rank owns, the norm and the clipping."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ttrace.adapters.adapter import Listener, Optimizer, Piece, groups_of
from ttrace.tensors.ids import MAIN_PARAM


class Watch:
    """Tells of each step of an optimizer, until removed."""

    def __init__(
        self, optimizer: Optimizer, listener: Listener, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._optimizer = optimizer
        own_step = optimizer.step
        functions = importlib.import_module("megatron.core.optimizer.optimizer")

        def step(*args: Any, **kwargs: Any) -> Any:
            before()
            with _told_clip(functions, listener):
                result = own_step(*args, **kwargs)
            norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            if norm is not None:
                listener.hears_norm(torch.as_tensor(float(norm)))
            after()
            return result

        optimizer.step = step

    def remove(self) -> None:
        del self._optimizer.step


@contextmanager
def _told_clip(functions: Any, listener: Listener) -> Iterator[None]:
    """While a step runs, the factor of clipping is told."""
    own = getattr(functions, "clip_grad_by_total_norm_fp32", None)
    if own is None:
        yield
        return

    def told(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> Any:
        listener.hears_clip(torch.as_tensor(min(1.0, max_norm / (float(total_norm) + 1e-6))))
        return own(parameters, max_norm, total_norm, *args, **kwargs)

    functions.clip_grad_by_total_norm_fp32 = told
    try:
        yield
    finally:
        functions.clip_grad_by_total_norm_fp32 = own


def parts(optimizer: Optimizer | None) -> Iterator[Any]:
    """The optimizers that a chained one consists of, or the one itself."""
    if optimizer is not None:
        yield from getattr(optimizer, "chained_optimizers", [optimizer])


def run_of(optimizer: Optimizer | None, parameter: nn.Parameter) -> tuple[int, int] | None:
    """Which run of a parameter's values this rank owns of a distributed optimizer; None if it is not distributed.

    A parameter of which this rank owns nothing has an empty run.
    """
    distributed = [part for part in parts(optimizer) if hasattr(part, "model_param_gbuf_map")]
    for part in distributed:
        where = part.model_param_gbuf_map.get(parameter)
        if where is not None:
            owned = part._get_model_param_range_map(parameter)["param"]
            return owned.start, owned.end
    return (0, 0) if distributed else None


def groups(
    optimizer: Optimizer | None, parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Mapping[str, object]]]:
    """The parameters that this rank updates, each with its group: the optimizer has copies in place of them."""
    wanted = list(parameters)
    for part in parts(optimizer):
        places = getattr(part, "model_param_group_index_map", None)
        if places is not None:
            yield from ((p, part.optimizer.param_groups[places[p][0]]) for p in wanted if p in places)
            continue
        known = {id(copy): group for group in groups_of(part.optimizer) for copy in group["params"]}
        for parameter in wanted:
            group = known.get(id(_main_copy(part, parameter)))
            if group is not None:
                yield parameter, group


def state(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Piece]:
    """What this rank keeps for a parameter: moments, and its own copy of it."""
    for part in parts(optimizer):
        groups = getattr(part, "model_param_group_index_map", None)
        if groups is not None:
            if parameter in groups:
                group, order = groups[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                return _pieces(part, parameter, main, run_of(part, parameter))
        else:
            main = _main_copy(part, parameter)
            if main in part.optimizer.state:
                return _pieces(part, parameter, main, None)
    return {}


def _main_copy(part: Any, parameter: nn.Parameter) -> torch.Tensor:
    """What the optimizer steps in place of a parameter; until 0.9 the parameter itself did not say."""
    main: torch.Tensor = getattr(parameter, "main_param", parameter)
    if main is parameter:
        groups = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
        copies = (copy for own, copied in groups for model, copy in zip(own, copied, strict=True) if model is parameter)
        main = next(copies, main)
    return main


def _pieces(part: Any, parameter: nn.Parameter, main: torch.Tensor, run: tuple[int, int] | None) -> dict[str, Piece]:
    own = {MAIN_PARAM: main} if main.dtype != parameter.dtype else {}
    found = {**own, **part.optimizer.state.get(main, {})}
    return {
        str(key): Piece(value.detach(), run if value.shape == main.shape else None)
        for key, value in found.items()
        if isinstance(value, torch.Tensor)
    }
