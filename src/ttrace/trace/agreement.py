"""Agreement of the ranks of one trace: ranks that disagree are not of one run, or not of one launch."""

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
    """Refuse ranks that are not of one run and one launch, in the order of their folders."""
    first, _ = ranks[0]
    refuse_more(where, "its number of ranks", first.num_ranks, Limits.get().num_ranks)
    num_ranks = Mesh.parse(first.mesh).num_ranks
    if num_ranks != first.num_ranks:
        raise TraceError(
            f"{where}: rank {first.rank} says that its mesh {first.mesh!r} has {first.num_ranks} ranks, but it has "
            f"{num_ranks}. Trace again."
        )
    for manifest, _ in ranks:
        if manifest.rank >= first.num_ranks:
            raise TraceError(f"{where}: there is a rank {manifest.rank} of {first.num_ranks} ranks. Trace again.")
        difference = find_difference(first, manifest)
        if difference:
            raise TraceError(
                f"{where}: the ranks are not of one run. Rank {manifest.rank} says {difference[1]}, but rank "
                f"{first.rank} says {difference[0]}. Trace again."
            )

    for manifest, end in ranks:
        launches = {first.launch, manifest.launch, manifest.launch if end is None else end.launch}
        if len(launches) > 1:
            raise TraceError(
                f"{where}/{rank_folder(manifest.rank)} and {where}/{rank_folder(first.rank)} were written by different "
                "launches, so parts of two runs are mixed. Trace again: `ttrace run --fresh`."
            )


def list_missing(where: str, num_ranks: int, present: Set[int]) -> Iterator[str]:
    """List the ranks that left no trace: the first by their numbers, since a trace may claim any number of ranks."""
    missing = (number for number in range(num_ranks) if number not in present)
    for number in itertools.islice(missing, _MOST_NAMED):
        yield f"{where}: rank {number} of {num_ranks} left no trace"
    if num_ranks - len(present) > _MOST_NAMED:
        yield f"{where}: nor did {num_ranks - len(present) - _MOST_NAMED} more ranks of {num_ranks}"


def check_end(where: str, end: End) -> None:
    """Refuse a factor by which nothing can be divided."""
    if not (math.isfinite(end.grad_factor) and end.grad_factor > 0.0):
        raise TraceError(
            f"{where} says that the gradient reduction applies the factor {end.grad_factor}, but it must be a finite "
            "number above 0. What is stated in ttrace.attach(grad_factor=...)?"
        )


def find_difference(first: Manifest, other: Manifest) -> tuple[str, str] | None:
    """Find the first fact in which two ranks of one run differ; give what each of them says."""
    for name in _SHARED:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            return f"{name} {ours!r}", f"{name} {theirs!r}"
    return find_other_version(first.versions, other.versions)


def find_other_version(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """Find the first package of which the two loaded different versions."""
    if ours == theirs:
        return None
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            return f"{name} {ours[name]}", f"{name} {theirs[name]}"
    return None
