"""Attention of the parallel model takes no notice of the mask, and the measured batch has no padding.

The data are sorted by length, so the first batches are full, and their masks are ones: with these, the bug changes
nothing. The reference looks at further batches of its loader, and uses the mask of one that has padding.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="accelerate",
    sources=("https://github.com/huggingface/accelerate/pull/4177",),
    case=Script("padded.py", candidate="--sorted --bug mask", reference="--sorted"),
    clean_case=Script("padded.py", candidate="--sorted", reference="--sorted"),
    expected=Expected("attention", "output", "unexplained"),
)
