"""Policy of accepted deviations, and baseline of known findings.

People write a policy: it names tensors that may differ, why, and until when.

[[allow]]
site = "*.router/decision"
reason = "the fused router breaks ties the other way, see our issue 12"
until = 2027-01-31

`ttrace` writes a baseline, so that a project with bugs can start to use checks at once: only new findings fail.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ttrace.errors import TTraceError
from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import CauseName, Comparison, Exit, Finding, HiddenDifference, Judgement, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.rules import matches
from ttrace.untrusted import load_settings, parse_json, write_named


class Allowance(BaseModel):
    """Sites that may differ, why, and for how long."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    until: datetime.date


class _PolicyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    allow: tuple[Allowance, ...] = ()


@dataclass(frozen=True)
class Policy:
    """The allowances on a given day; the first one that matches a tensor applies to it."""

    allowances: tuple[Allowance, ...] = ()
    today: datetime.date = datetime.date.min

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Load a file of allowances, as they hold today."""
        advice = "It needs [[allow]] tables with site, reason and until = YYYY-MM-DD."
        file = load_settings("policy", path, _PolicyFile.model_validate, advice=advice)
        return cls(file.allow, datetime.datetime.now(tz=datetime.UTC).date())

    def apply(
        self, comparisons: Sequence[Comparison], hidden: Sequence[HiddenDifference] = ()
    ) -> tuple[list[Comparison], list[HiddenDifference], list[str]]:
        """Excuse the comparisons that are allowed, leave out such hidden differences, and note each allowance."""
        ids = {c.id for c in comparisons if c.verdict.is_wrong or c.spoils} | {own for own, _ in hidden}
        allowed = {own: allowance for own in ids if (allowance := self._find_allowance(own)) is not None}
        used = Counter(allowed.values())
        excused = [_excuse(each, allowed[each.id]) if each.id in allowed else each for each in comparisons]
        notes = [self._describe_use(allowance, used[allowance]) for allowance in self.allowances]
        return excused, [each for each in hidden if each[0] not in allowed], notes

    def _find_allowance(self, tensor_id: TensorId) -> Allowance | None:
        site = tensor_id.site
        return next((a for a in self.allowances if self.today <= a.until and matches(a.site, site)), None)

    def _describe_use(self, allowance: Allowance, count: int) -> str:
        if self.today > allowance.until:
            return f'the allowance for "{allowance.site}" ended on {allowance.until}'
        if not count:
            return f'the allowance for "{allowance.site}" excuses nothing: remove it'
        return (
            f'"{allowance.site}" is allowed to differ until {allowance.until}, {count} tensors do: {allowance.reason}'
        )


def _excuse(comparison: Comparison, allowance: Allowance) -> Comparison:
    why = Why(Reason.ALLOWED, text=f"{allowance.until}: {allowance.reason}")
    return replace(comparison, verdict=Verdict.UNJUDGED, why=why)


STRICT = Policy()
"""Nothing is allowed."""


class Known(BaseModel):
    """A known finding, at any step and with any error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str
    cause: CauseName
    axis: str | None = None

    @classmethod
    def of(cls, finding: Finding) -> Known:
        """Reduce a finding to what a baseline remembers of it."""
        return cls(site=str(finding.comparison.id.site), cause=finding.cause.name, axis=finding.cause.axis)


class _BaselineFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    findings: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """Findings that do not fail a check."""

    known: tuple[Known, ...] = ()

    @classmethod
    def of(cls, judgement: Judgement) -> Baseline:
        return cls(tuple(dict.fromkeys(map(Known.of, judgement.findings))))

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Load a file that `save` wrote."""
        advice = "--update-baseline writes one."
        file = load_settings("baseline", path, _BaselineFile.model_validate, parse=parse_json, advice=advice)
        return cls(file.findings)

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        try:
            write_named(path, _BaselineFile(findings=self.known).model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise TTraceError(f"{path} cannot be written: {error}.") from None

    def find_new(self, judgement: Judgement) -> tuple[Finding, ...]:
        """Find the findings that are not known."""
        return tuple(finding for finding in judgement.findings if Known.of(finding) not in self.known)

    def exit(self, judgement: Judgement) -> Exit:
        """Return the exit code of a check that ignores known findings, and what follows from them."""
        if not judgement.findings:
            return judgement.exit
        if self.find_new(judgement):
            return Exit.FOUND
        right = tuple(comparison for comparison in judgement.comparisons if not comparison.verdict.is_wrong)
        return replace(judgement, findings=(), comparisons=right).exit

    def add_notes(self, judgement: Judgement) -> Judgement:
        """Note which findings of the baseline are still there, and which are gone."""
        met = {Known.of(finding) for finding in judgement.findings}
        ends = {True: ": it does not fail", False: ", but is not a finding any more"}
        notes = (f"{one.site} ({one.cause.value}) is in the baseline{ends[one in met]}" for one in self.known)
        return replace(judgement, notes=(*judgement.notes, *notes))


NOTHING = Baseline()
"""Every finding fails."""
