"""Entries about drift and inference, which have a page of their own: docs/reference/watched.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zoo.bug import Topic, bugs, title
from zoo.score import Score, score

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "watched.md"
TOPICS = (Topic.DRIFT, Topic.INFERENCE)
_TEXT = """# Long runs and inference

`python -m zoo evaluate --watched` writes this page. Each entry is a reported bug. The *drift* entries put
their bug into a small training that [`ttrace.watch`](../howto/watch.md) watches without a reference. The *inference*
entries put it into generation, which is compared with one [forward pass](../howto/inference.md). The clean side is the
same program without the bug.

{num} bugs: {detected} detected, {explained} with the expected place and words; {accused} of {num} clean sides accused.

| entry | tier | found | clean side silent | report |
|---|---|---|---|---|
{rows}
"""


def list_watched() -> list[str]:
    """List these entries."""
    return [name for name, bug in bugs().items() if bug.topic in TOPICS]


def format_page(found: Score) -> str:
    """Format the page."""
    marks = {True: "yes", False: "**no**"}
    rows = [
        f"| `{line.name}` | {line.bug.tier} | {marks[line.is_detected]} | {marks[line.is_clean]} | {title(line.name)} "
        f"*{line.broken.sentence.partition('; see')[0]}* |"
        for line in found.lines
    ]
    return _TEXT.format(
        num=len(found.lines),
        detected=sum(line.is_detected for line in found.lines),
        explained=sum(line.is_explained for line in found.lines),
        accused=sum(not line.is_clean for line in found.lines),
        rows="\n".join(rows),
    )


def evaluate_watched(tell: Callable[[str], None]) -> int:
    """Run all of them, and write the page; return 1 if one is missed or a clean side is accused."""
    found = score(list_watched(), tell)
    PAGE.write_text(format_page(found))
    print(f"{found}\n{PAGE}")
    return 0 if all(line.is_detected and line.is_clean for line in found.lines) else 1
