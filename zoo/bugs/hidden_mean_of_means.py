"""Each rank divides its loss by the number of its own labels, and DDP takes the mean of these means.

Where ranks have different numbers of labels that are not ignored, the labels of some count more than those of others.
transformers, trl and others had this bug with gradient accumulation and with data parallelism. Here the data are sorted
by length, so the measured batch has no padding, and all ranks have the same number. The reference looks at further
batches of its loader, and generates labels as they have them.

The two numbers of labels differ by a few percent, and so do the weights of the ranks' gradients.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="transformers",
    sources=("https://github.com/huggingface/transformers/pull/34191",),
    case=Script("padded.py", reference="--sorted", candidate="--sorted --bug mean"),
    clean_case=Script("padded.py", reference="--sorted", candidate="--sorted"),
    # The loss of the ranks together is wrong first, and its gradient shows the weights.
    expected=Expected(".", "loss", "uneven weights"),
)
