"""This module runs a check as a torchrun job: every rank does its share, and one all-gather gives all results to all.

The shares are fixed beforehand, by bytes. What a rank has done it keeps in a file, so that the same job goes on where a
lost rank ended it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ttrace.errors import TTraceError
from ttrace.judge.engine import Context, Lot, Result, Work
from ttrace.workflow.engines.result_cache import Kept


class Torchrun:
    """The ranks of this job. `folder` is where they keep what they did; `close` removes it once the check is done."""

    def __init__(self, folder: Path) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise TTraceError(
                "--engine torchrun works in a job of torchrun: torchrun --nproc-per-node 8 -m ttrace check RUN "
                "--engine torchrun"
            )
        self.folder = folder
        signal.signal(signal.SIGTERM, lambda *_: self._lost())  # torchrun ends all ranks when one is lost
        dist.init_process_group("gloo")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        """All ranks are done."""
        self._together(lambda: dist.barrier())
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.destroy_process_group()

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        kept = Kept(self.folder, f"rank-{self.rank:05d}.jsonl", work, context.identity)
        ours: list[Result] = []
        for lot in shares(list(lots), self.num_ranks)[self.rank]:
            found = kept.found(lot)
            if found is None:
                found = work(context, lot.ids)
                kept.add(lot, found)
            ours += found
        everyones: list[list[Result]] = [[] for _ in range(self.num_ranks)]
        self._together(lambda: dist.all_gather_object(everyones, ours))
        for results in everyones:
            yield from results

    def _together(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError:
            self._lost()

    def _lost(self) -> NoReturn:
        raise TTraceError(
            f"a rank of this check was lost, or the job was cancelled. What was compared is kept in {self.folder}: the "
            "same command goes on from there."
        )


def shares(lots: list[Lot], num_ranks: int) -> list[list[Lot]]:
    """The lots of every rank: neighbours stay together, and all have about as many bytes to read."""
    total, before = sum(lot.num_bytes + 1 for lot in lots), 0
    result: list[list[Lot]] = [[] for _ in range(num_ranks)]
    for lot in lots:
        middle = before + (lot.num_bytes + 1) / 2  # an empty lot is some work too
        result[int(middle * num_ranks / total)].append(lot)
        before += lot.num_bytes + 1
    return result
