"""transformers up to 5.14.1: Gemma 3 takes the mean of each microbatch, whatever number it is told to divide by.

A loop that accumulates hands the model the number of labels in all microbatches, so that gradients add up to those of
one large batch. The image-text models of the family computed the loss by themselves and did not read the number: the
sum of means is as many times too large as there are microbatches. transformers' Trainer knew of it and divided by
their number, so that there it was a mean of means.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script

ARGUMENTS = "gemma3 --items"
WHEELS = ("transformers==5.14.1", *BESIDE_TRANSFORMERS)
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="transformers 5.14.1",
    sources=("https://github.com/huggingface/transformers/issues/37197",),
    case=Script("architectures.py", ARGUMENTS, ARGUMENTS, candidate_wheels=WHEELS, num_ranks=1),
    clean_case=Script("architectures.py", ARGUMENTS, ARGUMENTS, num_ranks=1),
    expected=Expected(".", "output", "constant factor", "mb"),
    since=(2, 13),
)
