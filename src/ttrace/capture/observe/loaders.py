"""The loader from which a thread got its last batch.

It shows whether each rank draws all of a dataset or a part, and what other batches have that the first ones lack:
padding, and labels that are ignored.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from ttrace.capture.observe.rng_use import save_generators
from ttrace.compat.torch import find_loader_iterator, make_fetch, read_loader
from ttrace.patches import Patches, SharedPatches

_thread = threading.local()
_MOST_BATCHES = 16
_MOST_SECONDS = 2.0
"""Reading further batches takes so long, and that of one batch more."""


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


def read_further_batches() -> Iterator[Any]:
    """Read some batches of this thread's last loader, from its begin, if its dataset is a map.

    The script does not notice: samplers are copies, and random generators are restored. What the dataset itself counts
    is changed.
    """
    iterator = getattr(_thread, "iterator", lambda: None)()
    if iterator is None or isinstance(read_loader(iterator)[0], IterableDataset):
        return
    restore, end = save_generators(), time.monotonic() + _MOST_SECONDS
    try:
        sampler = _copy_sampler(read_loader(iterator)[1])
        fetch = make_fetch(iterator)
        for indices in islice(sampler, _MOST_BATCHES):
            yield fetch(indices)
            if time.monotonic() > end:
                return
    except Exception:  # a dataset may fail in any way; what it could have shown remains untested, which is reported
        return
    finally:
        restore()


def _copy_sampler(sampler: Any) -> Any:
    """Copy a sampler with the samplers that it uses and their generators."""
    own = copy.copy(sampler)
    for name, value in vars(sampler).items():
        if isinstance(value, torch.Generator):
            setattr(own, name, value.clone_state())
        elif hasattr(value, "__iter__") and name == "sampler":
            setattr(own, name, _copy_sampler(value))
    return own


def _wrap_next(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def __next__(self: Any) -> Any:  # noqa: N807
        batch = method(self)
        _thread.iterator = weakref.ref(self)
        return batch

    return __next__


_shared = SharedPatches(lambda patches: patches.wrap(find_loader_iterator(), "__next__", _wrap_next))
