"""transformers: gradients that were summed over ranks are summed again with the next microbatch.

`replicated_with_grad_allreduce` sums the accumulated gradient of a norm in a hook after every backward. With a second
microbatch the first one's sum is summed again: q and k norms of Qwen3-MoE get the first microbatch tp times.

One microbatch a step is right: that is the clean side. Gradients of single microbatches are recorded, so that each
can be counted.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.hugging import Case

TP = {"tp_size": 2, "tp_plan": "auto"}

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.WRONG_COMMUNICATION,
    package="transformers 5.22.2",
    sources=(
        "https://github.com/huggingface/transformers/blob/v5.22.2/src/transformers/distributed/tensor_parallel.py",
    ),
    case=Case("qwen3_moe", "tp", TP, num_accumulated=2, microbatch_grads=True),
    clean_case=Case("qwen3_moe", "tp", TP, microbatch_grads=True),
    expected=Expected("model.layers.0.self_attn.q_norm", "param_grad", "microbatches"),
)
