"""Watch over the stages of one launch: the launched process goes on from one to the next by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ttrace.trace.format import MANIFEST, rank_folder

_PAUSE = 0.1
"""Seconds between two looks at the disk."""


@contextmanager
def watch_stages(stages: Mapping[str, Path], on_stage: Callable[[str], None]) -> Iterator[None]:
    """Call `on_stage` with the name of each stage as soon as the first rank begins its trace, in this order."""
    if not stages:
        yield
        return
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(stages, on_stage, is_over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _watch(stages: Mapping[str, Path], on_stage: Callable[[str], None], is_over: threading.Event) -> None:
    for name, out in stages.items():
        while not (out / rank_folder(0) / MANIFEST).exists():
            if is_over.wait(_PAUSE):
                return
        on_stage(name)
