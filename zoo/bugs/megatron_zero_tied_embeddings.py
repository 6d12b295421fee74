"""megatron-core 0.5.0: stages shard their copies of a tied embedding differently.

Gradients are reduced and scattered over dp first, then the first and the last stage sum theirs of the embedding. It
lies at opposite ends of the two stages' flat buffers, so that other ranks own it: what is reduced is added to what is
not, and the copies drift apart. 0.6.0 gives it a bucket of its own.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import dense

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.WRONG_COMMUNICATION,
    package="megatron-core 0.4.0-0.5.0",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/656",
        "https://github.com/NVIDIA/Megatron-LM/issues/844",
        "https://github.com/NVIDIA/Megatron-LM/commit/db2040f",
    ),
    paper=5,
    case=dense(4, "0.5.0", pp=2, zero=True),
    clean_case=dense(4, "0.5.0", pp=2, zero=True, tied=False),
    expected=Expected("embedding.word_embeddings", "param_grad", "tied copies", words="a copy in another module"),
)
