"""transformers up to 5.9.0: the Trainer counts labels that the loss does not use.

The loss of a causal model shifts labels by one, so the first label of each row is never predicted. The Trainer counted
it all the same, and divided losses and gradients by too large a number.

How much too large depends on the length of rows: by 4% for the rows of 24 tokens here, where most labels count. Rows
whose first label is ignored, such as those with a prompt, were counted right.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script

WHEELS = ("transformers==5.9.0", *BESIDE_TRANSFORMERS)
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="transformers 5.9.0",
    sources=("https://github.com/huggingface/transformers/pull/46204",),
    case=Script("trainer.py", candidate_wheels=WHEELS),
    clean_case=Script("trainer.py"),
    expected=Expected(".", "input", "count"),
    since=(2, 13),
)
