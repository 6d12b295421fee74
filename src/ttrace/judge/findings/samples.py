"""Samples that scripts keep: whether both sides trained on the same ones in total.

A sampler may give a rank other rows than the reference's microbatch has. What sums over all samples can be judged even
so; what belongs to one microbatch cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Comparison, Verdict
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace


@dataclass(frozen=True)
class Samples:
    """The samples of both sides, counted over all ranks, microbatches and steps."""

    num_rows: int
    """The rows of the reference,"""
    num_common: int
    """those of them that the candidate had, too,"""
    num_others: int
    """and the candidate's other rows. All of them in the slot that differs most."""

    @property
    def num_different(self) -> int:
        return self.num_rows - self.num_common + self.num_others


def count_samples(reference: Trace, candidate: Trace) -> Samples | None:
    """Count the samples of both sides; None unless both scripts kept their data.

    Several ranks of the candidate may have the same sample, if all samples are on equally many ranks.
    """
    ours, theirs = _count_rows(reference), _count_rows(candidate)
    if not ours or not theirs:
        return None
    slots = [_compare_slot(ours.get(slot, Counter()), theirs.get(slot, Counter())) for slot in {**ours, **theirs}]
    return max(slots, key=lambda slot: (slot.num_different, slot.num_rows))


def describe_other_samples(samples: Samples) -> str:
    return (
        f"the two sides trained on different samples: of the reference's {samples.num_rows} rows, the candidate had "
        f"{samples.num_common}, and {samples.num_others} others. Make both sides load the same ones, or run without "
        "--data own."
    )


def note_moved_samples(samples: Samples) -> str:
    return (
        f"both sides trained on the same {samples.num_rows} rows, but not each rank and microbatch on the same ones: "
        "only what sums over all of them was judged"
    )


def excuse_moved_samples(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Excuse what depends on which samples are in a microbatch: its own tensors, and statistics of batches."""
    return [_excuse(comparison) for comparison in comparisons]


def note_repeated_rows(reference: Trace, candidate: Trace) -> list[str]:
    """Note that the candidate loaded as many rows as the reference, or more, but at most half as many different ones.

    Generated data replaced them, which is right on every rank, so no tensor shows it. Scripts may shuffle differently:
    which rows were loaded says nothing, but that there were fewer different ones does. Only slots count in which no two
    rows of the reference are equal: labels of a few classes are equal by chance.
    """
    ours, theirs = _count_rows(reference, "replaced"), _count_rows(candidate, "replaced")
    distinct = {slot: rows for slot, rows in ours.items() if 1 < len(rows) == rows.total()}
    if not distinct or not all(_is_repeated(rows, theirs.get(slot, Counter())) for slot, rows in distinct.items()):
        return []
    num_ours = sum(map(len, distinct.values()))
    num_theirs = sum(len(theirs[slot]) for slot in distinct)
    return [
        f"the script's own data were replaced, and are not judged. But where the reference loaded {num_ours} different "
        f"rows, the candidate loaded only {num_theirs}, some on several ranks. Does each data-parallel rank load its "
        "own? With --data own, the data are judged, too"
    ]


def _excuse(comparison: Comparison) -> Comparison:
    tensor_id = comparison.id
    is_of_microbatch = tensor_id.microbatch is not None or tensor_id.kind is Kind.BUFFER_AFTER
    if not is_of_microbatch or comparison.verdict is Verdict.PASS:
        return comparison
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.MOVED_SAMPLES), tolerance=None)


def _is_repeated(ours: Counter[str], theirs: Counter[str]) -> bool:
    return theirs.total() >= ours.total() and 2 * len(theirs) <= len(ours)


def _count_rows(trace: Trace, which: Literal["samples", "replaced"] = "samples") -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for rank in trace.ranks:
        for slot, rows in (getattr(rank.end, which) if rank.end else {}).items():
            counts.setdefault(slot, Counter()).update(rows)
    return counts


def _compare_slot(ours: Counter[str], theirs: Counter[str]) -> Samples:
    num_replicas = max(1, theirs.total() // ours.total()) if ours else 1
    expected = Counter({row: count * num_replicas for row, count in ours.items()})
    common = (expected & theirs).total()
    return Samples(ours.total(), common // num_replicas, theirs.total() - common)
