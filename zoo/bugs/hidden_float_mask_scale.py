"""The softmax of masked attention has the scale of another width, behind a mask of floats.

A vision model was given the scale of its attention, did not use it, and computed one from the head's width, which is
different where the model is sharded. Training goes on, with scores that are too small or too large.

The mask of this batch is 1.0 for tokens and 0.0 for padding, and attention adds (1 - mask) * -1e4 to its scores. Other
numbers in place of the mask let one score win everywhere, and then the scale makes no difference: the gradients of
queries and keys are zero on both sides.

Here the parallel model divides by the width, not by its root.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="transformers",
    sources=("https://github.com/huggingface/transformers/pull/43481",),
    case=Script("padded.py", candidate="--bug scale"),
    clean_case=Script("padded.py"),
    expected=Expected("attention", "output", "unexplained"),
)
