"""transformers up to 5.12.1: models that listen learn to say the word after the next.

Moonshine's decoder gets the labels shifted by one as its input, so its output is aligned with the labels. The loss of
causal models shifts them once more. The same was wrong in Florence-2, Canary and others.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script

WHEELS = ("transformers==5.12.1", *BESIDE_TRANSFORMERS)
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.DATA,
    package="transformers 5.12.1",
    sources=(
        "https://github.com/huggingface/transformers/pull/46784",
        "https://github.com/huggingface/transformers/pull/46903",
    ),
    case=Script("architectures.py", "moonshine", "moonshine", candidate_wheels=WHEELS, num_ranks=1),
    clean_case=Script("architectures.py", "moonshine", "moonshine", num_ranks=1),
    expected=Expected(".", "output", "unexplained"),
    since=(2, 13),
)
