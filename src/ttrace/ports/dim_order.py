"""Orders of dims: the same tensor may be `batch seq hidden` on one side and `seq batch hidden` on the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ttrace.errors import TTraceError

_REST = "..."


@dataclass(frozen=True)
class DimOrder:
    """The names of dims on the reference's and on the candidate's side."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]
    has_rest: bool

    @classmethod
    @cache
    def parse(cls, text: str) -> DimOrder:
        """Parse `batch seq ... -> seq batch ...`."""
        sides = [side.split() for side in text.split("->")]
        if len(sides) != 2 or not _are_same_dims(*sides):
            raise TTraceError(
                f"{text!r} is no order of dims: it names the same dims on both sides, as in "
                "'batch seq ... -> seq batch ...', where '...' stands for the rest and comes last."
            )
        ours, theirs = (tuple(name for name in side if name != _REST) for side in sides)
        return cls(ours, theirs, _REST in sides[0])

    def permute(self, num_dims: int) -> tuple[int, ...] | None:
        """Return for each of the candidate's dims the reference's one; None for a tensor of other dims."""
        named = len(self.reference)
        if num_dims < named or (num_dims > named and not self.has_rest):
            return None
        return (*map(self.reference.index, self.candidate), *range(named, num_dims))


def _are_same_dims(ours: list[str], theirs: list[str]) -> bool:
    is_last = all(_REST not in side[:-1] for side in (ours, theirs))
    return is_last and bool(ours) and len(set(ours)) == len(ours) and sorted(ours) == sorted(theirs)
