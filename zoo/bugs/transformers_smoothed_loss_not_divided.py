"""transformers up to 5.14.1: with label smoothing, the Trainer does not divide the loss of accumulated microbatches.

The Trainer leaves the division to the model, which gets the number of labels in the whole batch. With label smoothing
another function computes the loss, as the mean over one microbatch; so gradients are a sum of means.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script

WHEELS = ("transformers==5.14.1", *BESIDE_TRANSFORMERS)
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="transformers 5.14.1",
    sources=(
        "https://github.com/huggingface/transformers/issues/46731",
        "https://github.com/huggingface/transformers/pull/47261",
    ),
    case=Script("trainer.py", "--smooth", "--smooth", candidate_wheels=WHEELS),
    clean_case=Script("trainer.py", "--smooth", "--smooth"),
    expected=Expected(".", "loss", "constant factor"),
    since=(2, 13),
)
