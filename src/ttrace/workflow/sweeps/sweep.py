"""A sweep: its cells run against references that they share, as many at once as ranks allow.

Every distinct reference command runs once, with its twins, in a run's folder of its own. A cell is a run's folder too,
in which reference and twins are links: whatever reads a run reads a cell.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.verdict import Exit, Judgement
from ttrace.report.sweep import SweepRow, SweepTable
from ttrace.workflow.flow import Commands, Flow, OnText
from ttrace.workflow.folder import CELLS, REFERENCES, is_empty
from ttrace.workflow.investigation import Investigation
from ttrace.workflow.launch import Launches
from ttrace.workflow.run import AS_USUAL, Run, Strictness
from ttrace.workflow.stages import change
from ttrace.workflow.sweeps.failure_condition import FailureCondition, find_condition
from ttrace.workflow.sweeps.sweep_file import Configuration, Matrix, spell_values


@dataclass(frozen=True)
class CellResult:
    """How a cell ended."""

    cell: Configuration
    run: Run
    exit: Exit
    seconds: float
    judgement: Judgement | None = None
    problem: str = ""
    """Why there is no judgement."""


@dataclass(frozen=True)
class SweepResult:
    """All results, and when the sweep fails."""

    cells: tuple[CellResult, ...]
    num_references: int
    condition: FailureCondition | None
    """None if nothing failed."""

    @property
    def exit(self) -> Exit:
        codes = {result.exit for result in self.cells}
        return next((code for code in (Exit.FOUND, Exit.UNJUDGED) if code in codes), Exit.PASSED)

    @property
    def table(self) -> SweepTable:
        """The rows of the report."""
        rows = [
            SweepRow.of(
                result.judgement,
                result.problem,
                name=result.cell.name,
                values=result.cell.values,
                exit=result.exit,
                seconds=result.seconds,
                folder=str(result.run.folder),
            )
            for result in self.cells
        ]
        smallest = tuple(spell_values(dict(cell)) for cell in self.condition.smallest) if self.condition else ()
        condition = str(self.condition) if self.condition else ""
        return SweepTable(tuple(rows), self.num_references, condition, smallest)


@dataclass(frozen=True)
class Sweep:
    """Fills a folder. `settings` holds what is common to all plans."""

    folder: Path
    matrix: Matrix
    settings: Plan
    num_twins: int
    max_ranks: int
    timeout: float
    strictness: Strictness = AS_USUAL
    repeats: bool = True
    isolates: bool = True
    """Whether the smallest failing cells are isolated."""
    on_stage: OnText = lambda _: None
    on_result: Callable[[CellResult], None] = lambda _: None
    _launches: Launches = field(default_factory=Launches)

    def run(self, *, fresh: bool = False) -> SweepResult:
        """Run and judge every cell, then isolate the smallest failing ones; no command is left running."""
        check_sweep_folder(self.folder)
        try:
            references = self._trace_references(fresh=fresh)
            flows = {cell.folder: self._prepare(cell, references[cell.reference]) for cell in self.matrix.cells}
            results = {result.cell.folder: result for result in self._run_cells(flows, fresh=fresh)}
        finally:
            self._launches.close()
        ordered = [results[cell.folder] for cell in self.matrix.cells]
        result = SweepResult(tuple(ordered), len(references), _find_condition(self.matrix, ordered))
        return self._isolate_smallest(result) if self.isolates else result

    def _isolate_smallest(self, result: SweepResult) -> SweepResult:
        """Add what isolated runs show of the smallest failing cells."""
        smallest = [dict(cell) for cell in result.condition.smallest] if result.condition else []
        cells = [self._isolate(cell) if cell.cell.values in smallest else cell for cell in result.cells]
        return replace(result, cells=tuple(cells))

    def _isolate(self, result: CellResult) -> CellResult:
        assert result.judgement is not None
        self.on_stage(f"{result.cell.name}: isolated")
        flow = replace(self._flow(result.cell), launches=None)  # those of all cells are closed
        return replace(result, judgement=self._investigation(flow).isolate(result.judgement))

    def _trace_references(self, *, fresh: bool) -> dict[tuple[str, ...], Run]:
        """Trace every distinct reference with its twins, one after the other."""
        runs: dict[tuple[str, ...], Run] = {}
        for cell in self.matrix.cells:
            if cell.reference in runs:
                continue
            run = runs[cell.reference] = Run(self.folder / REFERENCES / str(len(runs)))
            self.on_stage(f"reference {len(runs)}")
            commands = Commands(cell.reference, cell.reference, self.num_twins, self.timeout)
            flow = Flow(run, commands, self._settings(run), launches=self._launches)
            flow.prepare(fresh=fresh)
            flow.trace_references()
        return runs

    def _prepare(self, cell: Configuration, reference: Run) -> Flow:
        """Make the cell's folder, with links to the reference and its twins."""
        flow = self._flow(cell)
        flow.prepare()
        _link(flow.run, reference)
        return flow

    def _flow(self, cell: Configuration) -> Flow:
        run = Run(self.folder / CELLS / cell.folder)
        commands = Commands(cell.reference, cell.candidate, self.num_twins, self.timeout)
        return Flow(run, commands, self._settings(run), launches=self._launches)

    def _investigation(self, flow: Flow) -> Investigation:
        return Investigation(flow, self.strictness, repeats=self.repeats, isolates=False)

    def _settings(self, run: Run) -> Plan:
        return change(self.settings, out=run.folder)

    def _run_cells(self, flows: dict[str, Flow], *, fresh: bool) -> Iterator[CellResult]:
        """Run all cells: the largest start first, others whenever they fit beside those that run."""
        waiting = sorted(self.matrix.cells, key=lambda cell: -self._num_ranks(cell))
        running: dict[Future[CellResult], int] = {}
        with ThreadPoolExecutor(len(waiting)) as pool:
            try:
                while waiting or running:
                    while (cell := self._next(waiting, sum(running.values()))) is not None:
                        waiting.remove(cell)
                        running[pool.submit(self._run_cell, cell, flows[cell.folder], fresh=fresh)] = self._num_ranks(
                            cell
                        )
                        self.on_stage(f"{len(waiting)} cells to come, {len(running)} running")
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        del running[future]
                        self.on_result(future.result())
                        yield future.result()
            finally:
                self._launches.close()  # threads end when what they wait for does

    def _num_ranks(self, cell: Configuration) -> int:
        """Return how many ranks a cell counts for: one that does not state them, or has too many, runs alone."""
        return min(cell.num_ranks or self.max_ranks, self.max_ranks)

    def _next(self, waiting: list[Configuration], num_busy: int) -> Configuration | None:
        return next((cell for cell in waiting if num_busy + self._num_ranks(cell) <= self.max_ranks), None)

    def _run_cell(self, cell: Configuration, flow: Flow, *, fresh: bool) -> CellResult:
        start = time.monotonic()
        try:
            flow.trace_candidate(fresh=fresh)
            judgement = self._investigation(flow).judge()
        except TTraceError as error:
            return CellResult(cell, flow.run, Exit.UNJUDGED, time.monotonic() - start, problem=str(error))
        return CellResult(cell, flow.run, judgement.exit, time.monotonic() - start, judgement)


def check_sweep_folder(folder: Path) -> None:
    """Refuse a folder that holds something other than a sweep."""
    if not is_empty(folder) and not (folder / REFERENCES).is_dir():
        raise TTraceError(f"{folder} is not empty and holds no earlier sweep. Choose another --out.")


def count_ranks() -> int:
    """Return how many ranks run at once by default; cells would all use the same accelerators, so they take turns."""
    return 1 if torch.accelerator.is_available() else os.cpu_count() or 1


def _link(run: Run, reference: Run) -> None:
    """Make the reference and its twins part of a cell's folder."""
    for old in (run.reference, *run.twins()):
        if old.is_symlink():
            old.unlink()
        elif old.exists():
            shutil.rmtree(old)
    for trace in (reference.reference, *reference.twins()):
        (run.folder / trace.name).symlink_to(os.path.relpath(trace, run.folder), target_is_directory=True)


def _find_condition(matrix: Matrix, results: list[CellResult]) -> FailureCondition | None:
    failures, passes = (
        [result.cell.values for result in results if result.exit is code] for code in (Exit.FOUND, Exit.PASSED)
    )
    return find_condition(matrix.axes, failures, passes) if failures else None
