"""transformers up to 5.14.1: the Trainer does not count the first label of models with an encoder, which learn it.

Since 5.10 the Trainer leaves out the first label of each row, which the loss of a causal model never uses. The decoder
of a model with an encoder gets its labels shifted as input, and uses all of them: losses and gradients are divided by
too small a number: by 4% for the rows of 24 tokens here. The opposite,
a label that is counted and not learned, was the bug that 5.10 mended.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script

ARGUMENTS = "moonshine --trainer"
WHEELS = ("transformers==5.14.1", *BESIDE_TRANSFORMERS)
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="transformers 5.10-5.14.1",
    sources=("https://github.com/huggingface/transformers/pull/46903",),
    case=Script("architectures.py", ARGUMENTS, ARGUMENTS, candidate_wheels=WHEELS),
    clean_case=Script("architectures.py", ARGUMENTS, ARGUMENTS),
    expected=Expected(".", "input", "count"),
    since=(2, 13),
)
