"""Gradient norm: gradients that several ranks share are counted by each of them.

Where the norm is summed over ranks, what they hold in common must be counted once. Megatron-core recognises this by
attributes of the parameter, which are missing or wrong in several layers; here every gradient counts twice.

All gradients are right. Only the norm is too large, and with it every step that clips is too small: training is
slower than it should be. Neither the loss of the first step nor any activation or gradient shows it, only the norm
itself and the update that is made with it.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import counted_twice
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.NORM,
    package="megatron-core up to 0.18.2",
    sources=("https://github.com/NVIDIA/Megatron-LM/pull/5916", "https://github.com/NVIDIA/Megatron-LM/issues/7452"),
    case=small("ddp"),
    patch=counted_twice,
    expected=Expected(
        ".",
        "grad_norm",
        "gradient norm",
        "dp",
        line="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        operation="clip_grad_norm_",
    ),
)
