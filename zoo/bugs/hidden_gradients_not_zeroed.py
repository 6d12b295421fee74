"""The distributed run does not set gradients to zero after a step.

torchforge forgot zero_grad, so each step added its gradients to those of all steps before, and so did a trainer of
LoRA adapters. In the first traced step of an unchanged script no tensor differs, because TTrace drops the gradients
that steps without generated data left. It finds that they were there.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="torchforge",
    sources=(
        "https://github.com/meta-pytorch/torchforge/pull/71",
        "https://github.com/tenstorrent/tt-blacksmith/pull/711",
    ),
    case=Script("plain_loop.py", "", "--keep-gradients"),
    clean_case=Script("plain_loop.py"),
    # The first parameter of the model.
    expected=Expected("words", "param_grad", "stale gradients"),
)
