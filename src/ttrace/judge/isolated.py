"""This module puts an ordinary and an isolated judgement together: which modules are wrong by themselves.

In the ordinary run everything after the first wrong tensor is wrong too, so a second fault hides behind the first. In
the isolated run each module speaks for itself, but on generated inputs. A module is accused where both agree.
"""

from __future__ import annotations

from dataclasses import replace

from ttrace.judge.verdict import PASSED_BY, Finding, Judgement
from ttrace.tensors.ids import Kind


def combined(ordinary: Judgement, isolated: Judgement) -> Judgement:
    """The ordinary findings, each with whether its module is wrong by itself, and those that hid behind them."""
    alone = {finding.module for finding in isolated.findings}
    wrong = {comparison.id for comparison in ordinary.comparisons if comparison.verdict.is_wrong}
    told = {finding.module for finding in ordinary.findings}
    known = [replace(finding, alone=finding.module in alone) for finding in ordinary.findings]
    hidden: dict[str, Finding] = {}
    for finding in isolated.findings:
        if finding.module not in told and finding.comparison.id in wrong:
            hidden.setdefault(finding.module, replace(finding, alone=True))
    calls = _wrong_calls(isolated)
    found = (*_by_evidence(known), *hidden.values())
    findings = tuple(replace(finding, inside=calls.get(finding.module, "")) for finding in found)
    return replace(ordinary, findings=findings, notes=(*ordinary.notes, *_notes(isolated)))


def _by_evidence(findings: list[Finding]) -> list[Finding]:
    """What is wrong by itself comes first; otherwise in the order in which it appeared."""
    return sorted(findings, key=lambda finding: not finding.alone)


def _wrong_calls(isolated: Judgement) -> dict[str, str]:
    """By module, the first wrong call of a torch function in its own code."""
    found: dict[str, str] = {}
    for comparison in isolated.comparisons:
        if comparison.id.kind is Kind.CALL and comparison.verdict.is_wrong:
            function, _, number = comparison.id.site.slot.rpartition(".")
            found.setdefault(comparison.id.name, f"{function}, call {int(number) + 1}")
    return found


def _notes(isolated: Judgement) -> list[str]:
    unjudged = sum(comparison.spoils for comparison in isolated.comparisons)
    words = [f"{unjudged} tensors of the isolated run could not be judged"] if unjudged else []
    passed = sum(comparison.reason == PASSED_BY for comparison in isolated.comparisons)
    words += [f"{passed} tensors were not judged in isolation: {PASSED_BY}"] if passed else []
    return [*words, *(f"isolated: {problem}" for problem in isolated.problems)]
