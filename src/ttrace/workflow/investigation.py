"""The whole investigation of a run: trace, judge, and follow up what is wrong until its cause is as clear as it gets.

`ttrace run`, the pytest plugin and `ttrace sweep` all call it. A finding is followed up in three steps: the candidate
runs again, so that its own run-to-run noise is known; what only sketches were recorded of is recorded in full; and
every module runs isolated, on generated inputs, with the calls inside the accused modules recorded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

from ttrace.errors import TTraceError
from ttrace.judge.findings.isolated import combine
from ttrace.judge.reason import HIDDEN
from ttrace.judge.tolerance.run_to_run import is_repeated
from ttrace.judge.verdict import Judgement
from ttrace.layouts.ids import ROOT
from ttrace.trace.reader import Trace
from ttrace.workflow.flow import Flow
from ttrace.workflow.run import AS_USUAL, Strictness, is_complete

_MOST_FULL = 5
"""Findings of which the modules' tensors are recorded in full."""


@dataclass(frozen=True)
class Investigation:
    """Leads from a run's commands to a judgement. A follow-up that fails adds a note and changes no verdict."""

    flow: Flow
    strictness: Strictness = AS_USUAL
    repeats: bool = True
    """Whether a candidate with findings runs a second time."""
    isolates: bool = True
    """Whether a run with findings is followed by an isolated one."""

    def run(self) -> Judgement:
        """Trace reference, twins and candidate, judge them, and follow up findings."""
        self.flow.trace()
        return self.judge()

    def judge(self) -> Judgement:
        """Judge the traces of the run's folder, and follow up findings."""
        self.flow.on_stage("check")
        judgement = self.flow.run.judge_ordinary(self.strictness)
        if _has_wrong_values(judgement) and (self.repeats or self.isolates):
            self.flow.on_stage("")
            self.flow.on_note(
                f"so far wrong first: {judgement.findings[0].comparison.id}. Running again to explain it."
            )
        if _has_wrong_values(judgement) and self.repeats:
            judgement = self.repeat(judgement)
        if _has_wrong_values(judgement) and Trace(self.flow.run.reference).has_sketches:
            judgement = self.record_in_full(judgement)
        if _has_wrong_values(judgement) and self.isolates:
            judgement = self.isolate(judgement)
        return judgement

    def repeat(self, judgement: Judgement) -> Judgement:
        """Run the candidate again; if the second run differs from the first, judge with the noise between them."""
        run = self.flow.run
        try:
            # What the two runs have in common is measured where something is wrong first, and needs their values.
            self.flow.trace_repeat(_list_accused(judgement))
            if is_complete(run.repeat) and not is_repeated(Trace(run.candidate), Trace(run.repeat)):
                self.flow.on_stage("check with the candidate's noise")
                return self.flow.run.judge_ordinary(self.strictness)
        except TTraceError as error:
            judgement = _add_note(judgement, f"the candidate could not be run a second time: {error}")
        shutil.rmtree(run.repeat, ignore_errors=True)  # its mark stays: a repeat without a trace was the same
        return judgement

    def record_in_full(self, judgement: Judgement) -> Judgement:
        """Record in full what was wrong first in sketches, and judge with the values."""
        try:
            self.flow.trace_in_full([site for name in _list_accused(judgement) for site in list_sites(name)])
            self.flow.on_stage("check in full")
            return self.flow.run.judge_ordinary(self.strictness)
        except TTraceError as error:
            shutil.rmtree(self.flow.run.full.folder, ignore_errors=True)
            return _add_note(judgement, f"what was wrong could not be recorded in full: {error}")

    def isolate(self, judgement: Judgement) -> Judgement:
        """Run everything isolated, and add what that shows of the findings."""
        isolated = self.flow.run.isolated
        try:
            self.flow.trace_isolated(tuple(dict.fromkeys(finding.module for finding in judgement.findings)))
            self.flow.on_stage("isolated check")
            return combine(judgement, isolated.judge_ordinary(self.strictness))
        except TTraceError as error:
            shutil.rmtree(isolated.folder, ignore_errors=True)
            return _add_note(judgement, f"the isolated run failed: {error}")


def _list_accused(judgement: Judgement) -> list[str]:
    """List the modules and tensors of the first findings by name."""
    worst = judgement.findings[:_MOST_FULL]
    return list(dict.fromkeys(name for finding in worst for name in (finding.module, finding.comparison.id.name)))


def list_sites(module: str) -> list[str]:
    """What of a module is recorded in full: itself and all that is inside."""
    return [module] if module == ROOT else [module, f"{module}.*"]


def _has_wrong_values(judgement: Judgement) -> bool:
    """Whether anything is wrong that another run can explain: what values do not show needs no explanation."""
    return any(finding.comparison.reason not in HIDDEN for finding in judgement.findings)


def _add_note(judgement: Judgement, note: str) -> Judgement:
    return replace(judgement, notes=(*judgement.notes, note))
