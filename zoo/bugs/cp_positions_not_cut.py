"""Pipeline and context parallelism: the table of positions that was cut is not the one that stages use.

torchtitan cut the buffers of the whole model, which only served to make the stages: their own copies kept all
positions, and every rank took its part of the sequence for the first.

It needs pipeline and context parallelism together. Attention still sees every token, but the second half of a
sequence has the positions of the first half. Nothing is out of range, and no shape is wrong. Here all ranks have the
same table of positions.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import positions_not_offset
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="torchtitan before 0.1.0",
    sources=("https://github.com/pytorch/torchtitan/pull/792",),
    case=small("cp-gather"),
    patch=positions_not_offset,
    expected=Expected(".", "buffer", "moved", line="dist.broadcast(rope, 0)", operation="broadcast"),
)
