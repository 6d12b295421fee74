"""The rows with which a vocabulary is padded take part in the softmax of the loss.

Kernels of the cross-entropy marked the classes beyond the vocabulary with -inf, and then bounded all logits, which made
the marks finite: classes that are no words have a share of the probability. The loss is a little too large, and the
head's padding has gradients.

Here an embedding has 128 rows for 97 words, and the parallel model does not cut its logits. Labels must be words: the
loss of the reference has no other classes, and a label beyond them would end the script. So generated labels stay
below 97, although the embedding has more rows.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.HIDDEN,
    package="unsloth",
    sources=("https://github.com/unslothai/unsloth/pull/10616",),
    case=Script("padded.py", candidate="--bug vocabulary"),
    clean_case=Script("padded.py"),
    expected=Expected(".", "loss", "unexplained"),
)
