"""PEFT up to 0.19.1: LoRA-FA takes one scaling for all layers, also for those of another rank.

The optimizer projects gradients by the scaling that it computed from the rank it was told. Layers that `rank_pattern`
gives another rank have another scaling, so they are updated by too much or too little.

The gradients that enter the optimizer are right, and Adam divides a constant factor out of the update, but for its
epsilon: so the update differs by little. Its moments differ by the square of the factor, but it keeps them by name and
not by parameter, where nobody looks. 0.20.0 keeps one scaling for each parameter.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.OPTIMIZER,
    package="peft 0.19.1",
    sources=("https://github.com/huggingface/peft/pull/3315",),
    case=Script("lora.py", "--fa", "--fa", candidate_wheels=("peft==0.19.1",)),
    clean_case=Script("lora.py", "--fa", "--fa"),
    expected=Expected("base_model.model.model.layers.0.self_attn.v_proj.lora_B.default", "update", "unexplained"),
    since=(2, 13),
)
