"""transformers: the plan of GLM-4-MoE names no norms between the projections that it cuts.

With `use_qk_norm` each rank normalises its own heads, so the gradient of the shared weight must be summed over ranks.
Qwen3's plan says so; this one does not, and the copies drift apart.

The loss of the first step and all activations are exact, and so are the gradients of everything but these norms. Data
parallelism, which sums all gradients, is not affected.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.hugging import Case

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.MISSING_COMMUNICATION,
    package="transformers 5.22.2",
    sources=(
        "https://github.com/huggingface/transformers/blob/v5.22.2/src/transformers/models/glm4_moe/configuration_glm4_moe.py",
    ),
    case=Case("glm4_moe", "tp", {"tp_size": 2, "tp_plan": "auto"}),
    clean_case=Case("glm4_moe", "fsdp", {"fsdp_size": 2}),
    expected=Expected("model.layers.0.self_attn.q_norm", "param_grad", "missing all-reduce", "tp"),
)
