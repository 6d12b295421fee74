"""Disagreements: what a monitor found, in which step, on which ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Trouble(Enum):
    """The closed set of what a monitor finds."""

    REPLICAS_DIFFER = "replicas differ"
    SAME_DATA = "same data"
    OTHER_DATA = "other data"
    REPEATED_DATA = "repeated data"
    FROZEN = "frozen"
    STEP_COUNT = "step count"
    RANDOM_STATE = "random state"


@dataclass(frozen=True)
class Disagreement:
    """One thing that is not as it must be. All ranks have the same list of them."""

    trouble: Trouble
    step: int
    site: str
    """The tensor, as `layers.0.weight/param`, or what else is compared, such as `data`."""
    ranks: tuple[int, ...]
    """The ranks that are wrong: those that differ from the majority, or all if there is none."""
    majority: tuple[int, ...] = ()
    """The ranks that agree with each other; empty if no value has a majority."""
    axis: str = ""
    """The axis of the mesh along which they must agree."""
    detail: str = ""
    evidence: tuple[Path, ...] = ()
    """Files with the tensors of one of the wrong ranks and of one that agrees with the majority."""

    def __str__(self) -> str:
        where = _name_ranks(self.ranks)
        if self.trouble is Trouble.REPLICAS_DIFFER:
            others = f"{_name_ranks(self.majority)} agree" if self.majority else "no value has a majority"
            words = f"{self.site} differs on {where} along {self.axis}, where all must be equal; {others}"
        elif self.trouble is Trouble.SAME_DATA:
            words = f"{where} train on the same data along {self.axis}: each must have samples of its own"
        elif self.trouble is Trouble.OTHER_DATA:
            words = f"{where} train on other data along {self.axis}, where all must have the same"
        elif self.trouble is Trouble.RANDOM_STATE:
            words = f"{where} have drawn other random numbers along {self.axis}, where all must draw the same"
        elif self.trouble is Trouble.STEP_COUNT:
            words = f"the optimizer of {where} has taken another number of steps"
        elif self.trouble is Trouble.REPEATED_DATA:
            words = f"{where} trained twice in a row on the same data"
        else:
            words = f"{self.site} does not change on {where}, though it is trained"
        detail = f" ({self.detail})" if self.detail else ""
        kept = f"; see {self.evidence[0].parent}" if self.evidence else ""
        return f"step {self.step}: {words}{detail}{kept}"


OnDisagreement = Callable[[Disagreement], object]
"""A function that gets what a monitor finds."""


def _name_ranks(ranks: tuple[int, ...]) -> str:
    """Name ranks; of many, the first ones."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
