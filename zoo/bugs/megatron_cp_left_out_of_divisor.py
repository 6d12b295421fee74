"""megatron-core 0.8.0: gradients are summed over dp x cp and divided by dp alone.

`DistributedDataParallel` takes its factor from the data-parallel group without context parallelism, though it reduces
over the one with it. Every gradient is too large by cp. Adam hides it but for clipping, epsilon and weight decay.
0.7.0 took the size of the group that it reduces over, and 0.9.0 does again.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import dense

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="megatron-core 0.8.0",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/906",
        "https://github.com/NVIDIA/Megatron-LM/commit/3bdcbbb",
    ),
    paper=4,
    case=dense(version="0.8.0", cp=2),
    clean_case=dense(version="0.8.0", tp=2, sp=True),
    expected=Expected("embedding.word_embeddings", "param_grad", "double reduction", "cp"),
)
