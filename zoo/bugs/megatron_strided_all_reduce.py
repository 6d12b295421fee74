"""megatron-core 0.16.1: summing a tensor that is not contiguous sums a copy of it.

`_reduce` of `mappings.py` hands `input_.contiguous()` to the all-reduce and returns `input_`. For a tensor that lies
in order both are one; a transposed one comes back as it was, each rank with its own partial sum. SkyRL met it in
practice. The layer here is one of our own between Megatron's, which has its output reduced transposed, or not.

It needs a layer that sums a transposed tensor; no layer of Megatron that was tried here does
(tests/megatron/test_sweep.py). From there on each rank computes with its own share of the sum, and no rank notices.
It was fixed in 0.19.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import dense

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="megatron-core 0.8.0-0.18.2",
    sources=("https://github.com/NVIDIA/Megatron-LM/pull/5338",),
    case=dense(tp=2, custom="transposed"),
    clean_case=dense(tp=2, custom="contiguous"),
    expected=Expected("decoder.layers.0.mlp", "output", "missing all-reduce", "tp"),
)
