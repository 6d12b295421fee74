"""This module writes a judgement as JSON, for programs."""

from __future__ import annotations

import math
from typing import Any

from ttrace.judge.verdict import Comparison, Exit, Finding, Judgement, Verdict

SCHEMA = 1


def as_json(judgement: Judgement, next_command: str) -> dict[str, Any]:
    """The whole judgement; numbers that JSON cannot hold become null."""
    return {
        "schema": SCHEMA,
        "exit": int(judgement.exit),
        "counts": {verdict.value: judgement.count(verdict) for verdict in Verdict},
        "findings": [_finding(finding) for finding in judgement.findings],
        "problems": list(judgement.problems),
        "notes": list(judgement.notes),
        "next": next_command,
        "tensors": [_comparison(comparison) for comparison in judgement.comparisons],
    }


def failure(message: str) -> dict[str, Any]:
    """The same form for a command that could not judge anything."""
    return {
        "schema": SCHEMA,
        "exit": int(Exit.UNJUDGED),
        "counts": {},
        "findings": [],
        "problems": [message],
        "notes": [],
        "next": "",
        "tensors": [],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": str(finding.comparison.id),
        "module": finding.module,
        "kind": finding.comparison.id.kind.value,
        "source": finding.source,
        "cause": finding.cause.name,
        "sentence": finding.cause.sentence,
        "axis": finding.cause.axis,
        "evidence": list(finding.cause.evidence),
        "error": _number(finding.comparison.error),
        "tolerance": _number(finding.comparison.tolerance.value if finding.comparison.tolerance else math.nan),
        "num_after": finding.num_after,
        "alone": finding.alone,
        "inside": finding.inside,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    tolerance = comparison.tolerance
    return {
        "id": str(comparison.id),
        "verdict": comparison.verdict.value,
        "reason": comparison.reason,
        "error": _number(comparison.error),
        "scale": _number(comparison.stats.scale),
        "tolerance": _number(tolerance.value) if tolerance else None,
        "twin_error": _number(tolerance.twin_error) if tolerance else None,
        "replica_error": _number(comparison.replica_error),
        "layout": comparison.layout,
        "by": comparison.by,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
