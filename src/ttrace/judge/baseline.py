"""Baseline of known findings: a check fails only on other ones.

`ttrace` writes a baseline, so that a project with bugs can start to use checks at once. People write allowances
(policy.py): they name tensors that may differ, why, and until when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ttrace.errors import TTraceError
from ttrace.files import read_settings, write_named
from ttrace.judge.verdict import CauseName, Exit, Finding, Judgement
from ttrace.untrusted import parse_json


class Known(BaseModel):
    """A known finding, at any step and with any numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str
    cause: CauseName
    axis: str | None = None

    @classmethod
    def of(cls, finding: Finding) -> Known:
        return cls(site=str(finding.comparison.id.site), cause=finding.cause.name, axis=finding.cause.axis)


class _File(BaseModel):
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
        try:
            return cls(_File.model_validate(parse_json(read_settings(path), path)).findings)
        except (OSError, ValueError, RecursionError) as error:
            raise TTraceError(f"{path} is no baseline: {error}. --update-baseline writes one.") from None

    def save(self, path: Path) -> None:
        try:
            write_named(path, _File(findings=self.known).model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise TTraceError(f"{path} cannot be written: {error}.") from None

    def find_new(self, judgement: Judgement) -> tuple[Finding, ...]:
        """Find the findings that are not known."""
        return tuple(finding for finding in judgement.findings if Known.of(finding) not in self.known)

    def exit(self, judgement: Judgement) -> Exit:
        """How a check ends if known findings, and what follows from them, do not count."""
        if not judgement.findings:
            return judgement.exit
        if self.find_new(judgement):
            return Exit.FOUND
        right = tuple(comparison for comparison in judgement.comparisons if not comparison.verdict.is_wrong)
        return replace(judgement, findings=(), comparisons=right).exit

    def add_notes(self, judgement: Judgement) -> Judgement:
        """Add to a judgement what the baseline knows, and what of it is gone."""
        met = {Known.of(finding) for finding in judgement.findings}
        ends = {True: ": it does not fail", False: ", and is no finding any more"}
        notes = (f"{one.site} ({one.cause.value}) is in the baseline{ends[one in met]}" for one in self.known)
        return replace(judgement, notes=(*judgement.notes, *notes))


NOTHING = Baseline()
"""Every finding fails."""
