"""The loader from which a thread got its last batch. It shows whether each rank draws all of a dataset, or a part."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ttrace.compat.torch import find_loader_iterator, read_loader
from ttrace.patches import Patches, SharedPatches

_thread = threading.local()


def watch_last_loader(patches: Patches) -> None:
    """Remember the last loader of each thread, until the patches are removed."""
    _shared.acquire()
    patches.on_remove(_shared.release)


def count_samples() -> int:
    """Count the samples of the dataset from which this thread's last loader draws each one once; 0 if it does not.

    A distributed sampler draws only a part of the dataset, and any other sampler may do so.
    """
    iterator = getattr(_thread, "iterator", lambda: None)()
    if iterator is None:
        return 0
    with suppress(Exception):  # a dataset may have no length, or fail in any other way
        dataset, batches = read_loader(iterator)
        sampler: Any = batches.sampler if type(batches) is BatchSampler else None
        is_whole = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
        return len(dataset) if is_whole and len(sampler) == len(dataset) else 0
    return 0


def _wrap_next(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def __next__(self: Any) -> Any:  # noqa: N807
        batch = method(self)
        _thread.iterator = weakref.ref(self)
        return batch

    return __next__


_shared = SharedPatches(lambda patches: patches.wrap(find_loader_iterator(), "__next__", _wrap_next))
