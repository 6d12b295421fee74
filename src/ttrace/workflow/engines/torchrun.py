"""Engine of a check as a torchrun job: every rank does its share, and one all-gather gives all results to all.

The shares are fixed beforehand, by bytes. Each rank writes its results into a file, so that the same job continues
where a lost rank ended it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ttrace.errors import TTraceError
from ttrace.judge.engine import Context, Engine, Lot, Result, Work
from ttrace.trace.format import END, MANIFEST
from ttrace.values.kernels.choice import name_variant
from ttrace.workflow.engines.result_cache import ResultCache
from ttrace.workflow.run import Run, Strictness


@contextmanager
def open_job(run: Run, strictness: Strictness) -> Iterator[Engine]:
    """Make the engine of this job for the length of a block. Results are kept if the block ends with an error."""
    job = Torchrun(run.folder / f"check-{_fingerprint(run, strictness)}")
    yield job
    job.close()


class Torchrun:
    """The ranks of this job. `folder` holds their results until `close`."""

    def __init__(self, folder: Path) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise TTraceError(
                "--engine torchrun works in a job of torchrun: torchrun --nproc-per-node 8 -m ttrace check RUN "
                "--engine torchrun"
            )
        self.folder = folder
        signal.signal(signal.SIGTERM, lambda *_: self._refuse_loss())  # torchrun ends all ranks when one is lost
        dist.init_process_group("gloo")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        """Wait until all ranks are done, and remove their files."""
        self._run_collective(lambda: dist.barrier())
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.destroy_process_group()

    def map(self, work: Work[Context, Result], context: Context, lots: Iterable[Lot]) -> Iterator[Result]:
        cache = ResultCache(self.folder, f"rank-{self.rank:05d}.jsonl", work, context.identity)
        ours: list[Result] = []
        for lot in divide_lots(list(lots), self.num_ranks)[self.rank]:
            results = cache.find(lot)
            if results is None:
                results = work(context, lot.ids)
                cache.add(lot, results)
            ours += results
        gathered: list[list[Result]] = [[] for _ in range(self.num_ranks)]
        self._run_collective(lambda: dist.all_gather_object(gathered, ours))
        for results in gathered:
            yield from results

    def _run_collective(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError:
            self._refuse_loss()

    def _refuse_loss(self) -> NoReturn:
        raise TTraceError(
            f"a rank of this check was lost, or the job was cancelled. What was compared is kept in {self.folder}: the "
            "same command continues from there."
        )


def divide_lots(lots: list[Lot], num_ranks: int) -> list[list[Lot]]:
    """Divide lots among ranks: neighbours stay together, and each rank reads about as many bytes."""
    total, before = sum(lot.num_bytes + 1 for lot in lots), 0
    result: list[list[Lot]] = [[] for _ in range(num_ranks)]
    for lot in lots:
        middle = before + (lot.num_bytes + 1) / 2  # an empty lot is some work too
        result[int(middle * num_ranks / total)].append(lot)
        before += lot.num_bytes + 1
    return result


def _fingerprint(run: Run, strictness: Strictness) -> str:
    """Return a text that differs as soon as the traces do, or the way they are judged."""
    digest = hashlib.sha256(f"{metadata.version('torch-ttrace')} {strictness.margin} {name_variant()}".encode())
    for name in (MANIFEST, END):
        for path in sorted(run.folder.rglob(name)):
            state = path.stat()
            digest.update(f"{path.relative_to(run.folder)} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
