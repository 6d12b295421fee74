"""Strip of a model's layers, one character each: which are wrong, and how close the others are to their tolerance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ttrace.judge.depth import layer_of
from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import Kind

WRONG, OPEN, NOTHING = "✗", "?", "·"
_LEVELS = "▁▂▃▄▅▆▇"
_MEANINGS = {WRONG: "✗ wrong", OPEN: "? not judged", NOTHING: "· nothing to judge"}
_WITHIN = "▁ to ▇ error within the tolerance"
_ROWS: Mapping[str, frozenset[Kind]] = {
    "forward": frozenset({Kind.INPUT, Kind.OUTPUT, Kind.DECISION, Kind.BUFFER}),
    "backward": frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.RECOMPUTE_INPUT, Kind.RECOMPUTE_OUTPUT}),
    "param_grad": frozenset({Kind.PARAM_GRAD, Kind.MAIN_GRAD}),
    "updates": frozenset({Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.BUFFER_AFTER}),
}


def draw_strip(comparisons: Sequence[Comparison], width: int) -> list[tuple[str, str]]:
    """Draw labelled lines: one that explains the strip, then one for each part of a step.

    A model without layers has none. Where there are more layers than `width`, several share a character.
    """
    layered = [(place, c) for c in comparisons if (place := layer_of(c.id.name)) is not None]
    stacks = Counter(stack for (stack, _), _ in layered)
    if not stacks:
        return []
    stack = stacks.most_common(1)[0][0]
    mine = [(layer, comparison) for (name, layer), comparison in layered if name == stack]
    last = max(layer for layer, _ in mine)
    if last == 0:
        return []
    per_mark = -(-(last + 1) // width)
    name = f"{stack}." if stack else ""
    shared = f", {per_mark} layers per mark" if per_mark > 1 else ""
    rows = list(_draw_rows(mine, last // per_mark + 1, per_mark))
    return [("depth", f"{name}0 to {last}{shared}: {_explain_marks(''.join(marks for _, marks in rows))}"), *rows]


def _explain_marks(drawn: str) -> str:
    """Explain the marks that occur: in a clean run nothing is called wrong."""
    words = [text for mark, text in _MEANINGS.items() if mark in drawn]
    return ", ".join([*words, *([_WITHIN] if set(_LEVELS) & set(drawn) else [])])


def _draw_rows(mine: Sequence[tuple[int, Comparison]], num_marks: int, per_mark: int) -> Iterator[tuple[str, str]]:
    for label, kinds in _ROWS.items():
        cells: list[list[Comparison]] = [[] for _ in range(num_marks)]
        for layer, comparison in mine:
            if comparison.id.kind in kinds:
                cells[layer // per_mark].append(comparison)
        if any(cells):
            yield label, "".join(map(_choose_mark, cells))


def _choose_mark(cell: Sequence[Comparison]) -> str:
    if any(comparison.verdict.is_wrong for comparison in cell):
        return WRONG
    if any(comparison.spoils for comparison in cell):
        return OPEN
    excesses = [comparison.excess for comparison in cell if comparison.tolerance is not None]
    if not excesses:
        return NOTHING
    return _LEVELS[int(min(max(excesses) * len(_LEVELS), len(_LEVELS) - 1))]
