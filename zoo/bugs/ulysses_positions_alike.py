"""Ulysses: all ranks number their part of the sequence from zero.

SpecForge made position ids for the local length, so that peers had the same ones: every rank took its part for the
beginning. Attention still sees the whole sequence, with wrong distances between its parts.

Nothing is out of range and no shape is wrong. A model that is trained like this learns other distances between words
than it gets later, on one rank or on another number of ranks. Here the table of positions of every rank begins like
that of the first.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import positions_not_offset
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="SpecForge",
    sources=("https://github.com/sgl-project/SpecForge/pull/563",),
    case=small("cp-ulysses"),
    patch=positions_not_offset,
    expected=Expected(".", "buffer", "moved", line="dist.broadcast(rope, 0)", operation="broadcast"),
)
