"""This module lists the sites whose layout nobody stated, and writes the rules that would, for `attach(rules=...)`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ttrace.judge.reason import Reason
from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.pattern import matches
from ttrace.layouts.source import INFERRED
from ttrace.tensors.ids import Site

_WARNING = (
    "# A missing all-reduce looks exactly like a pending sum. Take a line below only if you know that the sum is\n"
    "# finished later, and where."
)


def find_unstated(judgement: Judgement) -> list[dict[str, str]]:
    """Every site whose layout nobody stated, with the layout it seems to have and how that is known."""
    rows: dict[str, dict[str, str]] = {}
    for how, comparisons in zip(("inferred", "pending sum", "contradicted", "unknown"), _kinds(judgement), strict=True):
        for comparison in comparisons:
            site = str(comparison.id.site)
            rows[site] = {"site": site, "how": how, "layout": comparison.suggestion or comparison.layout}
    return list(rows.values())


def suggest_rules(judgement: Judgement) -> str:
    """A rules file: a line for every site whose layout was inferred; what must be decided first is switched off."""
    inferred, pending, contradicted, unknown = _kinds(judgement)
    doubtful = [*pending, *contradicted, *unknown]
    lines = ["[layouts]", *_lines(inferred, [c.layout for c in inferred], doubtful)]
    if pending:
        lines += ["", _WARNING]
        lines += [f"# {line}" for line in _lines(pending, [c.suggestion for c in pending], inferred)]
    if contradicted:
        lines += ["", "# With these, inferred from shapes, the candidate is wrong: they may be, or the candidate is."]
        lines += [f"# {line}" for line in _lines(contradicted, [c.layout for c in contradicted], inferred)]
    if unknown:
        lines += ["", "# No single layout explains the shapes of these; only you know it."]
        lines += [f"# {line}" for line in _lines(unknown, ["?"] * len(unknown), inferred)]
    return "\n".join(lines) + "\n"


def _kinds(judgement: Judgement) -> tuple[list[Comparison], ...]:
    """What was inferred, what looks like a pending sum, what was inferred and is wrong, and what nothing explains."""
    comparisons = judgement.comparisons
    inferred = [c for c in comparisons if c.by == INFERRED and c.layout and not c.suggestion]
    pending = [c for c in comparisons if c.suggestion]
    unknown = [c for c in comparisons if c.reason is Reason.NO_LAYOUT]
    # One rule speaks of all microbatches of a site, and of all kinds of a parameter: one that is wrong is enough.
    wrong = {_exact(c.id.site) for c in inferred if c.verdict.is_wrong}
    decided_elsewhere = {_exact(c.id.site) for c in (*pending, *unknown)}
    inferred = [c for c in inferred if _exact(c.id.site) not in decided_elsewhere]
    return (
        [c for c in inferred if _exact(c.id.site) not in wrong],
        pending,
        [c for c in inferred if _exact(c.id.site) in wrong],
        unknown,
    )


def _lines(comparisons: Sequence[Comparison], layouts: Sequence[str], others: Sequence[Comparison]) -> Iterator[str]:
    """One line per pattern; numbered modules share one where they agree, and none of `others` is among them."""
    known = dict(zip((c.id.site for c in comparisons), layouts, strict=True))
    elsewhere = {c.id.site for c in others}
    patterns: dict[str, str] = {}
    for site, layout in known.items():
        exact = _exact(site)
        wide = exact.replace(site.name, _without_numbers(site.name), 1)
        agree = all(other == layout for where, other in known.items() if matches(wide, where))
        agree = agree and not any(matches(wide, where) for where in elsewhere)
        patterns[wide if agree else exact] = layout
    return (f"{json.dumps(pattern)} = {json.dumps(layout)}" for pattern, layout in patterns.items())


def _exact(site: Site) -> str:
    """The pattern of one site: a parameter and everything that is shaped like it have one layout, so one line."""
    return site.name if site.kind.is_of_param else str(site)


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
