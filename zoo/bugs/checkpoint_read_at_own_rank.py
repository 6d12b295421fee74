"""Checkpoint: each rank reads the file of its own number, though the files were cut for another number of ranks.

SGLang read Grok 2's experts, cut for eight ranks, with four: rank 1 got the second eighth, not the second quarter. All
names were found, so that nothing was missing. Here four ranks read rows that are cut as for eight.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    weight: DTensor = loaded.model["layers.0.feed_forward.w1.weight"]
    whole, mine = weight.full_tensor(), weight.to_local()
    start = weight.device_mesh.get_local_rank() * len(mine) // 2
    mine.copy_(whole[start : start + len(mine)])


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="SGLang",
    sources=(
        "https://github.com/sgl-project/sglang/pull/36438",
        "https://github.com/vllm-project/vllm/pull/43863",
    ),
    case=Resumed(),
    patch=patch,
    expected=Expected("layers.0.feed_forward.w1", "param", "moved"),
)
