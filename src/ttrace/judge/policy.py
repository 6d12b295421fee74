"""Policy of accepted deviations: which tensors may differ, why, and until when.

[[allow]]
site = "*.router/decision"
reason = "the fused router breaks ties the other way, see our issue 12"
until = 2027-01-31
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ttrace.errors import TTraceError
from ttrace.files import read_settings
from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.pattern import matches
from ttrace.untrusted import parse_toml


class Allowance(BaseModel):
    """Sites that may differ, why, and for how long."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    until: datetime.date


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    allow: tuple[Allowance, ...] = ()


@dataclass(frozen=True)
class Policy:
    """The allowances that hold on a day; the first that matches a tensor applies to it."""

    allowances: tuple[Allowance, ...] = ()
    today: datetime.date = datetime.date.min

    @classmethod
    def load(cls, path: Path) -> Policy:
        try:
            file = _File.model_validate(parse_toml(read_settings(path), path))
        except (OSError, ValueError, RecursionError) as error:
            raise TTraceError(
                f"{path} allows nothing: {error}. It needs [[allow]] tables with site, reason and until = YYYY-MM-DD."
            ) from None
        return cls(file.allow, datetime.datetime.now(tz=datetime.UTC).date())

    def apply(self, comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[str]]:
        """Excuse the comparisons that are allowed; also return a note for each allowance."""
        result, used = [], Counter[Allowance]()
        for comparison in comparisons:
            allowance = self._find_allowance(comparison)
            if allowance is not None:
                used[allowance] += 1
                why = Why(Reason.ALLOWED, text=f"{allowance.until}: {allowance.reason}")
                comparison = replace(comparison, verdict=Verdict.UNJUDGED, why=why)
            result.append(comparison)
        return result, [self._describe_use(allowance, used[allowance]) for allowance in self.allowances]

    def _find_allowance(self, comparison: Comparison) -> Allowance | None:
        if not (comparison.verdict.is_wrong or comparison.spoils):
            return None
        site = comparison.id.site
        return next((a for a in self.allowances if self.today <= a.until and matches(a.site, site)), None)

    def _describe_use(self, allowance: Allowance, count: int) -> str:
        if self.today > allowance.until:
            return f'the allowance for "{allowance.site}" ended on {allowance.until}'
        if not count:
            return f'the allowance for "{allowance.site}" excuses nothing: drop it'
        return (
            f'"{allowance.site}" is allowed to differ until {allowance.until}, {count} tensors do: {allowance.reason}'
        )


STRICT = Policy()
"""Nothing is allowed."""
