"""Data parallelism: a setting that means "do not shard" also switches the reduction of gradients off.

verl made a mesh of `fsdp_size` ranks. With a size of 1 on several GPUs each rank is alone in its mesh: nothing is
sharded, and nothing is reduced either, so every rank trains a model of its own on its own data. Losses look as usual.

Here it is plain DDP that does not reduce. The other entries of this kind reduce too early or too late, or leave single
parameters out; here it is all of them in every microbatch. After one step the ranks have different parameters, and no
checkpoint has all of them.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import not_synchronised
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.MISSING_COMMUNICATION,
    package="verl",
    sources=("https://github.com/volcengine/verl/issues/7493",),
    case=small("ddp"),
    patch=not_synchronised,
    expected=Expected(
        "tok", "param_grad", "missing average", "dp", line="require_backward_grad_sync = False", operation="all_reduce"
    ),
)
