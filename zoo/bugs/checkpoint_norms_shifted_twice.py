"""Checkpoint: one is added to weights of norms that have it already.

Some models store norms around zero. A converter of MLX took a checkpoint that was converted for a raw one, and added
one a second time.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Cell
from zoo.harness.resumed import Loaded, Resumed


def patch(loaded: Loaded) -> None:
    for name, value in loaded.model.items():
        if "norm" in name:
            value.add_(1.0)


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.CHECKPOINT,
    package="mlx-lm",
    sources=("https://github.com/ml-explore/mlx-lm/pull/1623",),
    case=Resumed(Cell("tp+sp", 2, num_microbatches=4)),
    patch=patch,
    expected=Expected("layers.0.attention_norm", "param", "offset", words="+ 1"),
)
