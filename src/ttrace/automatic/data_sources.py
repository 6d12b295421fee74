"""The places where data enters a script: loaders, losses, random numbers and pipeline schedules.

A loader is observed where the script gets a batch, because loaders may fetch it earlier. This includes subclasses of
`torch.utils.data.DataLoader`, as in torchdata and Ray, and the loaders of Accelerate, which contain one.

Functions of `torch` and `torch.nn.functional` are replaced as soon as torch has been imported, before the script can
import them by name. A random draw is identified by the line of the script that makes it: lines that run only before the
training, such as those that make a dataset, do not run again.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from ttrace.automatic.imports import OnImport
from ttrace.compat.torch import let_script
from ttrace.patches import OutermostCall, Patches

OnBatch = Callable[[Any, Any], Any]
"""A function that gets a loader and its batch, and returns the batch to use instead."""
OnTarget = Callable[[torch.Tensor], torch.Tensor]
"""A function that gets the labels of a loss, and returns the labels to use instead."""
OnClasses = Callable[[int], object]
"""A function that gets the number of classes in the logits of a loss."""
Line = tuple[str, int]
"""A file and a line number."""
OnDraw = Callable[[Line, torch.Tensor, bool], torch.Tensor]
"""A function that gets the line of a draw, the numbers, and whether they are in [0, 1), and returns those to use."""
OnSchedule = Callable[[Any, Any, Any], AbstractContextManager[Any]]
"""A function that gets a schedule, and the positional and keyword arguments of its step. The step runs in the returned
context, which gives the arguments to use instead."""

_TARGET = "target"
_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses whose labels may be any real numbers."""
_OF_CLASSES = ("cross_entropy", "nll_loss")
_UNIT = ("rand", "rand_like")
_OTHER = ("randn", "randn_like", "randint", "randint_like", "normal", "bernoulli")
_script = OutermostCall()
_thread = threading.local()


def is_loading() -> bool:
    """Return whether this thread is inside a loader."""
    return getattr(_thread, "is_loading", False)


def watch_loaders(on_batch: OnBatch, patches: Patches) -> dict[str, OnImport]:
    """Call `on_batch` for every batch of every loader, until the patches are removed.

    Return the functions to call when other libraries are imported, in the form that `watch_imports` takes.
    """

    wrappers = set()

    def wrap(method: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(method)
        def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
            return _Batches(self, method(self), on_batch)

        wrappers.add(__iter__)
        return __iter__

    def wrap_kind(kind: Any) -> None:
        if kind.__iter__ not in wrappers:  # it is defined here, or in another base class
            patches.wrap(kind, "__iter__", wrap)

    def on_subclass(kind: Any, /, **kwargs: Any) -> None:
        super(DataLoader, kind).__init_subclass__(**kwargs)
        wrap_kind(kind)

    for kind in (DataLoader, *_list_subclasses(DataLoader)):
        wrap_kind(kind)
    patches.replace(DataLoader, "__init_subclass__", classmethod(on_subclass))

    def on_accelerate(module: ModuleType) -> None:
        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            wrap_kind(getattr(module, name))

    return {"accelerate.data_loader": on_accelerate}


def watch_losses(on_target: OnTarget, on_classes: OnClasses, patches: Patches) -> None:
    """Call `on_target` with the labels of every loss whose labels can be replaced, until the patches are removed.

    Before that, call `on_classes` if the labels are numbers of classes.
    """
    for name, function in inspect.getmembers(functional, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters)
        if _TARGET in parameters:
            position = parameters.index(_TARGET)
            wrapper = functools.partial(_wrap_loss, position=position, on_target=on_target, on_classes=on_classes)
            patches.wrap(functional, name, wrapper)


def watch_draws(on_draw: OnDraw, patches: Patches) -> None:
    """Call `on_draw` for random tensors that a script draws, until the patches are removed."""
    for name in (*_UNIT, *_OTHER):
        patches.wrap(torch, name, functools.partial(_wrap_draw, is_unit=name in _UNIT, on_draw=on_draw))


def watch_schedules(on_schedule: OnSchedule, patches: Patches) -> dict[str, OnImport]:
    """Run every step of a pipeline schedule of torch within `on_schedule`, until the patches are removed.

    Return the functions to call when torch's pipelining is imported, in the form that `watch_imports` takes.
    """

    def on_import(module: ModuleType) -> None:
        for kind in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
            patches.wrap(kind, "step", functools.partial(_wrap_step, on_schedule=on_schedule))

    return {"torch.distributed.pipelining.schedules": on_import}


class _Batches:
    """Iterator over a loader's batches. Batches that another loader fetches inside of it are not reported."""

    def __init__(self, loader: Any, inner: Iterator[Any], on_batch: OnBatch) -> None:
        self._loader, self._inner, self._on_batch = loader, inner, on_batch

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        is_inside = is_loading()
        _thread.is_loading = True
        try:
            batch = next(self._inner)
        finally:
            _thread.is_loading = is_inside
        return batch if is_inside else self._on_batch(self._loader, batch)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _list_subclasses(kind: type[Any]) -> list[type[Any]]:
    children: list[type[Any]] = kind.__subclasses__()
    return [each for child in children for each in (child, *_list_subclasses(child))]


def _wrap_loss(
    function: FunctionType, *, position: int, on_target: OnTarget, on_classes: OnClasses
) -> Callable[..., Any]:
    def replace_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or _script.is_running:
            return function(*args, **kwargs)
        target: Any = kwargs.get(_TARGET, args[position] if position < len(args) else None)
        outputs = args[0] if args else kwargs.get("input")
        if _is_data(function.__name__, target) and isinstance(outputs, torch.Tensor) and outputs.requires_grad:
            if function.__name__ in _OF_CLASSES and not outputs.is_nested:
                on_classes(outputs.shape[min(1, outputs.ndim - 1)])
            replacement = on_target(target)
            if _TARGET in kwargs:
                kwargs[_TARGET] = replacement
            else:
                args = (*args[:position], replacement, *args[position + 1 :])
        return _script.run(function, *args, **kwargs)

    def loss(*args: Any, **kwargs: Any) -> Any:
        return replace_target(args, kwargs)

    # torch.jit.script compiles the source of the wrapped function, with the names that the wrapper sees.
    wrapper = FunctionType(loss.__code__, function.__globals__, function.__name__, closure=loss.__closure__)
    return functools.update_wrapper(wrapper, function)


def _is_data(name: str, target: Any) -> TypeGuard[torch.Tensor]:
    """Return whether these are labels that can be replaced: not the output of a trained module, nor probabilities."""
    if not isinstance(target, torch.Tensor) or target.requires_grad:
        return False
    return not target.is_floating_point() or name in _REGRESSIONS


def _wrap_draw(function: Callable[..., Any], *, is_unit: bool, on_draw: OnDraw) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn = function(*args, **kwargs)
        if torch.compiler.is_compiling() or "out" in kwargs or not _may_be_data(drawn):
            return drawn
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None:
            return drawn
        return on_draw((caller.f_code.co_filename, caller.f_lineno), drawn, is_unit)

    let_script(draw, function)
    return draw


def _may_be_data(drawn: Any) -> bool:
    """Return whether this may be data: a plain tensor with more than one number, not a parameter."""
    return type(drawn) is torch.Tensor and not drawn.is_meta and not drawn.requires_grad and drawn.numel() > 1


def _wrap_step(method: Callable[..., Any], *, on_schedule: OnSchedule) -> Callable[..., Any]:
    @functools.wraps(method)
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with on_schedule(schedule, args, kwargs) as (args, kwargs):
            return method(schedule, *args, **kwargs)

    return step
