"""Attention of the parallel model takes no notice of the mask, and the measured batch has no padding.

A hook on attention modules, which context parallelism needs, discards whatever mask a layer was given, and says that it
is a causal one. `hidden-float-mask-dropped` is the same bug where the measured batch has padding.

The data are sorted by length, so the first batches are full, and their masks are ones: with these, the bug changes
nothing. The reference looks at further batches of its loader, and uses the mask of one that has padding.

Float masks keep their values, because other numbers would let one score win everywhere.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="accelerate",
    sources=("https://github.com/huggingface/accelerate/pull/4177",),
    case=Script("padded.py", reference="--sorted", candidate="--sorted --bug mask"),
    clean_case=Script("padded.py", reference="--sorted", candidate="--sorted"),
    expected=Expected("attention", "output", "unexplained"),
)
