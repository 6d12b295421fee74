"""Checkpoint: an uneven shard is saved as it was in the beginning.

torchtitan kept the state dict of its first save. FSDP2 pads a shard that is smaller than the others into other memory,
so that the cached tensor of an uneven vocabulary no longer was the parameter: what was saved and loaded was old.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed, shard_of


def patch(loaded: Loaded) -> None:
    stale = loaded.model["tok.weight"]
    stale.to_local().copy_(shard_of(loaded.initial["tok.weight"], stale))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="torchtitan",
    sources=(
        "https://github.com/pytorch/torchtitan/issues/1136",
        "https://github.com/pytorch/torchtitan/pull/1702",
    ),
    case=Resumed(),
    patch=patch,
    expected=Expected("tok", "param", "another's values", words="step 0"),
)
