"""Sites whose layout is not stated, and rules that would state it, for `attach(rules=...)`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ttrace.judge.reason import Reason
from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.ids import Site, drop_layers
from ttrace.layouts.placement import INFERRED
from ttrace.layouts.rules import matches
from ttrace.trace.format import Attachment

_WARNING = (
    "# A missing all-reduce looks exactly like a pending sum. Take a line below only if you know that the sum is\n"
    "# finished later, and where."
)


def find_unstated(judgement: Judgement) -> list[dict[str, str]]:
    """Find every site whose layout is not stated, the layout it seems to have, and how that is known."""
    rows: dict[str, dict[str, str]] = {}
    for how, comparisons in zip(
        ("inferred", "pending sum", "contradicted", "unknown"), _sort_sites(judgement), strict=True
    ):
        for comparison in comparisons:
            site = str(comparison.id.site)
            rows[site] = {"site": site, "how": how, "layout": comparison.suggestion or comparison.layout}
    return list(rows.values())


def suggest_rules(judgement: Judgement) -> str:
    """Write a rules file: a line for every site whose layout was inferred; doubtful lines are commented out."""
    inferred, pending, contradicted, unknown = _sort_sites(judgement)
    doubtful = [*pending, *contradicted, *unknown]
    lines = ["[layouts]", *_write_lines(inferred, [c.layout for c in inferred], doubtful)]
    if pending:
        lines += ["", _WARNING]
        lines += [f"# {line}" for line in _write_lines(pending, [c.suggestion for c in pending], inferred)]
    if contradicted:
        lines += [
            "",
            "# These were inferred from shapes, and with them the candidate is wrong: either they are wrong, or it is.",
        ]
        lines += [f"# {line}" for line in _write_lines(contradicted, [c.layout for c in contradicted], inferred)]
    if unknown:
        lines += ["", "# No single layout explains the shapes of these. Only you know their layouts."]
        lines += [f"# {line}" for line in _write_lines(unknown, ["?"] * len(unknown), inferred)]
    return "\n".join(lines) + "\n"


def _sort_sites(judgement: Judgement) -> tuple[list[Comparison], ...]:
    """Sort sites: inferred, looks like a pending sum, inferred but wrong, and explained by no layout."""
    comparisons = judgement.comparisons
    inferred = [c for c in comparisons if c.by == INFERRED and c.layout and not c.suggestion]
    pending = [c for c in comparisons if c.suggestion]
    unknown = [c for c in comparisons if c.reason is Reason.NO_LAYOUT]
    # One rule is for all microbatches of a site, and for all kinds of a parameter: a single wrong one is enough.
    wrong = {_make_pattern(c.id.site) for c in inferred if c.verdict.is_wrong}
    decided_elsewhere = {_make_pattern(c.id.site) for c in (*pending, *unknown)}
    inferred = [c for c in inferred if _make_pattern(c.id.site) not in decided_elsewhere]
    return (
        [c for c in inferred if _make_pattern(c.id.site) not in wrong],
        pending,
        [c for c in inferred if _make_pattern(c.id.site) in wrong],
        unknown,
    )


def _write_lines(
    comparisons: Sequence[Comparison], layouts: Sequence[str], others: Sequence[Comparison]
) -> Iterator[str]:
    """Write one line per pattern; numbered modules share one if they agree and it matches none of `others`."""
    known = dict(zip((c.id.site for c in comparisons), layouts, strict=True))
    elsewhere = {c.id.site for c in others}
    patterns: dict[str, str] = {}
    for site, layout in known.items():
        exact = _make_pattern(site)
        wide = exact.replace(site.name, drop_layers(site.name), 1)
        agree = all(other == layout for where, other in known.items() if matches(wide, where))
        agree = agree and not any(matches(wide, where) for where in elsewhere)
        patterns[wide if agree else exact] = layout
    return (f"{json.dumps(pattern)} = {json.dumps(layout)}" for pattern, layout in patterns.items())


def _make_pattern(site: Site) -> str:
    """Make the pattern of one site; a parameter and all tensors of its shape share one layout, so one line."""
    return site.name if site.kind.is_of_param else str(site)


def suggest_lines(attachment: Attachment) -> list[str]:
    """Write the lines with which a script would state what automatic attachment found."""
    names = [f"optimizer_{i + 1}" for i in range(len(attachment.optimizers))]
    optimizer = f"[{', '.join(names)}]" if len(names) > 1 else "optimizer"
    return [
        "import ttrace",
        f"session = ttrace.attach(model, {optimizer})  # {attachment.model}; {', '.join(attachment.optimizers)}",
        f"with session.step():  # around {attachment.num_microbatches} microbatches and the optimizer's step",
        f"    batch = session.batch(batch)  # for each microbatch, in place of {attachment.data}",
    ]
