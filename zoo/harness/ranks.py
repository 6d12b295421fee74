"""Real ranks that run a function: processes with gloo, one launch for many cases, and none outlives the call.

Ranks are forked from a server that has imported torch and the package once: that takes four seconds of CPU time, which
every spawned rank would take again.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.harness.limits import HANG

PRELOADED = ("zoo.harness.cells",)
"""What the server imports: all that most ranks need, and nothing that starts a thread."""


def on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = HANG, backend: str = "gloo"
) -> list[Any]:
    """Call a module-level function in each of `num_ranks` processes, and return the results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank,
                args=(dict(os.environ), rank, num_ranks, store, backend, results, function, args),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collected(num_ranks, results, processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            results.close()


def _rank(
    environment: dict[str, str],
    rank: int,
    num_ranks: int,
    store: str,
    backend: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    os.environ.clear()  # the server has that of its start
    os.environ.update(environment, OMP_NUM_THREADS="1")
    gc.freeze()  # what the server imported is here to stay: collecting need not look at it
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        results.put((rank, True, function(*args)))
        dist.barrier()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def _end_with_launcher() -> None:
    """End this rank when the process that launched it is gone, killed for instance: nobody else would end it."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _collected(num_ranks: int, results: Any, processes: Sequence[BaseProcess], timeout: float) -> list[Any]:
    returned: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(returned) < num_ranks:
        try:
            rank, worked, value = results.get(timeout=1.0)
        except queue.Empty:
            dead = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0) and i not in returned]
            if dead or time.monotonic() > end:
                raise TimeoutError(f"ranks {dead or 'that still run'} gave no result in {timeout:.0f} s") from None
            continue
        if not worked:
            raise AssertionError("\n".join([f"rank {rank} failed:\n{value}", *_other_failures(results)]))
        returned[rank] = value
    return [returned[rank] for rank in range(num_ranks)]


def _other_failures(results: Any) -> list[str]:
    """What other ranks say within seconds: the first to be heard may only have lost the one that failed."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            rank, worked, value = results.get(timeout=3.0)
            if not worked:
                found.append(f"rank {rank} failed:\n{value}")
    return found
