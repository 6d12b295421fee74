"""Blind spots: parameters for which a check would not have seen any fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace

_MOST_NAMED = 3


def find_blind_spots(
    comparisons: Sequence[Comparison], candidate: Trace, blind: AbstractSet[TensorId] = frozenset()
) -> dict[str, str]:
    """Find the trained parameters whose update no tensor would have shown to be wrong, and say why.

    `blind` are tensors that are known to reveal nothing.
    """
    trained = {name for rank in candidate.ranks for name, is_trained in rank.manifest.parameters.items() if is_trained}
    protected: dict[str, set[Kind]] = {}
    for comparison in comparisons:
        if comparison.id.name in trained and comparison.id.microbatch is None:
            kinds = protected.setdefault(comparison.id.name, set())
            if _has_power(comparison) and comparison.id not in blind:
                kinds.add(comparison.id.kind)
    return {name: words for name, kinds in protected.items() if (words := _describe_blind_spot(kinds))}


def note_blind_spots(comparisons: Sequence[Comparison], candidate: Trace) -> list[str]:
    """Note the blind spots of a check, one note for each reason."""
    found: Mapping[str, str] = find_blind_spots(comparisons, candidate)
    notes = []
    for words, count in Counter(found.values()).items():
        names = [name for name, reason in found.items() if reason == words]
        more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
        notes.append(f"not tested: {', '.join(names[:_MOST_NAMED])}{more} ({words})")
    return notes


def _has_power(comparison: Comparison) -> bool:
    """Whether the check would see the loss of the whole tensor; not if it is zero but for rounding."""
    is_judged = comparison.verdict is Verdict.PASS or comparison.verdict.is_wrong
    tolerance = comparison.tolerance
    if tolerance is None or tolerance.size:
        return False
    return is_judged and comparison.stats.aa > 0.0 and tolerance.value < 1.0


def _describe_blind_spot(protected: AbstractSet[Kind]) -> str:
    if Kind.UPDATE in protected:
        return ""
    if protected & {Kind.PARAM_GRAD, Kind.MAIN_GRAD}:
        return "its update is zero or not judged, so nothing tests the optimizer there"
    return "its gradient and its update are zero or not judged"
