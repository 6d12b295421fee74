"""Batches of data loaders, seen when the script gets them.

Loaders that build on `torch.utils.data.DataLoader`, as those of torchdata and Ray do, and those of Accelerate, which
hold one, are seen from outside: they may fetch a batch earlier than they hand it out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from ttrace.automatic.imports import OnImport
from ttrace.patches import Patches

OnBatch = Callable[[Any, Any], Any]
"""A function that gets a loader and the batch that it hands out, and returns the batch to hand out instead."""


_thread = threading.local()


def is_loading() -> bool:
    """Whether this thread is inside of a loader."""
    return getattr(_thread, "is_loading", False)


def watch_loaders(on_batch: OnBatch, patches: Patches) -> dict[str, OnImport]:
    """Call `on_batch` for every batch of every loader, until the patches are removed.

    Return what must be done when other libraries have been imported, in the form that `watch_imports` takes.
    """

    wrappers = set()

    def wrap(method: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(method)
        def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
            return _Batches(self, method(self), on_batch)

        wrappers.add(__iter__)
        return __iter__

    def wrap_kind(kind: Any) -> None:
        if kind.__iter__ not in wrappers:  # its own, or that of another base
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


class _Batches:
    """Iterator over a loader's batches. What another loader's iterator fetches inside of it is not reported."""

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
