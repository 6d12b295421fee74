"""transformers up to 5.5.4: the auxiliary loss of Mixtral takes the softmax of probabilities.

The router returned probabilities under the name of logits, and the loss that balances experts takes the softmax of what
it gets: its gradient is much too small, and experts are hardly balanced. 5.6.0 returns logits. So both sides here are
old releases; all else is alike in them.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import BESIDE_TRANSFORMERS, Script


def wheels(release: str) -> tuple[str, ...]:
    return (f"transformers=={release}", *BESIDE_TRANSFORMERS)


BUG = Bug(
    tier=Tier.T1,
    topic=Topic.DATA,
    package="transformers 5.0-5.5.4",
    sources=(
        "https://github.com/huggingface/transformers/issues/45120",
        "https://github.com/huggingface/transformers/pull/45111",
    ),
    case=Script("architectures.py", "mixtral", "mixtral", wheels("5.6.0"), wheels("5.5.4"), num_ranks=1),
    clean_case=Script("architectures.py", "mixtral", "mixtral", wheels("5.6.0"), wheels("5.6.0"), num_ranks=1),
    expected=Expected("model.layers.0.mlp.gate", "output", "function"),
    since=(2, 13),
)
