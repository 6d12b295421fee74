"""Checks that all ranks of a trace belong to one run and one launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set

from ttrace.errors import TraceError
from ttrace.layouts.mesh import Mesh
from ttrace.trace.format import End, Manifest, rank_folder
from ttrace.untrusted import Limits, refuse_more

_SHARED = ("role", "mesh", "seed", "num_ranks", "num_microbatches", "isolated")
_MOST_NAMED = 16


def check_ranks(where: str, ranks: Sequence[tuple[Manifest, End | None]]) -> None:
    """Raise TraceError unless the ranks, in the order of their folders, belong to one run and one launch."""
    first, _ = ranks[0]
    refuse_more(where, "its number of ranks", first.num_ranks, Limits.get().num_ranks)
    num_ranks = Mesh.parse(first.mesh).num_ranks
    if num_ranks != first.num_ranks:
        raise TraceError(
            f"{where}: rank {first.rank} has the mesh {first.mesh!r} with {num_ranks} ranks, but states that there are "
            f"{first.num_ranks}. Trace again."
        )
    for manifest, _ in ranks:
        if manifest.rank >= first.num_ranks:
            raise TraceError(
                f"{where}: there is a rank {manifest.rank}, but only {first.num_ranks} ranks. Trace again."
            )
        difference = find_difference(first, manifest)
        if difference:
            raise TraceError(
                f"{where}: the ranks belong to different runs. Rank {manifest.rank} has {difference[1]}, but rank "
                f"{first.rank} has {difference[0]}. Trace again."
            )

    for manifest, end in ranks:
        launches = {first.launch, manifest.launch, manifest.launch if end is None else end.launch}
        if len(launches) > 1:
            raise TraceError(
                f"{where}/{rank_folder(manifest.rank)} and {where}/{rank_folder(first.rank)} were written by different "
                "launches, so the trace mixes two runs. Trace again: `ttrace run --fresh`."
            )


def list_missing(where: str, num_ranks: int, present: Set[int]) -> Iterator[str]:
    """Yield a sentence for each rank that left no trace, and one for all after the first few: there may be many."""
    missing = (number for number in range(num_ranks) if number not in present)
    for number in itertools.islice(missing, _MOST_NAMED):
        yield f"{where}: rank {number} of {num_ranks} left no trace"
    if num_ranks - len(present) > _MOST_NAMED:
        yield f"{where}: nor did {num_ranks - len(present) - _MOST_NAMED} more ranks of {num_ranks}"


def check_end(where: str, end: End) -> None:
    """Raise TraceError for a gradient factor that values cannot be divided by."""
    if not (math.isfinite(end.grad_factor) and end.grad_factor > 0.0):
        raise TraceError(
            f"{where} states that the gradient reduction applies the factor {end.grad_factor}, but it must be a finite "
            "number above 0. Check ttrace.attach(grad_factor=...)."
        )


def find_difference(first: Manifest, other: Manifest) -> tuple[str, str] | None:
    """Find the first fact in which two ranks differ; return the fact as each of them has it."""
    for name in _SHARED:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            return f"{name} {ours!r}", f"{name} {theirs!r}"
    return find_version_difference(first.versions, other.versions)


def find_version_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """Find the first package that the two loaded in different versions; return its name and version for each."""
    if ours == theirs:
        return None
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            return f"{name} {ours[name]}", f"{name} {theirs[name]}"
    return None
