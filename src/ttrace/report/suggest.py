"""This module writes the rules that would state what was inferred, as TOML for `attach(rules=...)`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.pattern import matches
from ttrace.layouts.placed import INFERRED

_WARNING = (
    "# A missing all-reduce looks exactly like a pending sum. Take a line below only if you know that the sum is\n"
    "# finished later, and where."
)


def suggested(judgement: Judgement) -> str:
    """A rules file: a line for every site whose layout was inferred, pending sums apart and switched off."""
    inferred = [c for c in judgement.comparisons if c.by == INFERRED and c.layout and not c.suggestion]
    pending = [c for c in judgement.comparisons if c.suggestion]
    lines = ["[layouts]", *_lines(inferred, [c.layout for c in inferred])]
    if pending:
        lines += ["", _WARNING]
        lines += [f"# {line}" for line in _lines(pending, [c.suggestion for c in pending])]
    return "\n".join(lines) + "\n"


def _lines(comparisons: Sequence[Comparison], layouts: Sequence[str]) -> Iterator[str]:
    """One line per pattern; numbered modules share one where they agree."""
    known = dict(zip((c.id.site for c in comparisons), layouts, strict=True))
    patterns: dict[str, str] = {}
    for site, layout in known.items():
        # A parameter and everything that is shaped like it have one layout, so one line serves all kinds.
        exact = site.name if site.kind.is_of_param else str(site)
        wide = exact.replace(site.name, _without_numbers(site.name), 1)
        agree = all(other == layout for where, other in known.items() if matches(wide, where))
        patterns[wide if agree else exact] = layout
    return (f"{json.dumps(pattern)} = {json.dumps(layout)}" for pattern, layout in patterns.items())


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
