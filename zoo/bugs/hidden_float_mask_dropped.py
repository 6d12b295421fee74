"""Attention of the parallel model takes no notice of the mask that it is given: tokens attend to padding.

A hook on attention modules, which context parallelism needs, discards whatever mask a layer was given, and says that it
is a causal one. Training goes on with the wrong pattern of attention, and the loss looks plausible.

The mask of this batch is 1.0 for tokens and 0.0 for padding. Other numbers in place of it hide what a mask does:
one score wins everywhere, with the mask and without it.

Here the parallel model leaves out the line that adds the mask to the scores.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="accelerate",
    sources=("https://github.com/huggingface/accelerate/pull/4177",),
    case=Script("padded.py", candidate="--bug mask"),
    clean_case=Script("padded.py"),
    expected=Expected("attention", "output", "unexplained"),
)
