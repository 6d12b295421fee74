"""megatron-core 0.10.0: layers that cannot be divided evenly among the stages are dropped.

`get_num_layers_to_build` divides the number of layers by that of stages and keeps the integer: of five layers on two
stages four are trained, without a warning. Core refuses it since 0.11.0.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import dense

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.DATA,
    package="megatron-core 0.3.0-0.10.0",
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/issues/468",
        "https://github.com/NVIDIA/Megatron-LM/issues/1304",
        "https://github.com/NVIDIA/Megatron-LM/commit/9157970354",
    ),
    paper=10,
    case=dense(version="0.10.0", pp=2, layers=5),
    clean_case=dense(version="0.10.0", pp=2, layers=4),
    expected=Expected("decoder", "output", "missing modules", words="the candidate has no decoder.layers.4"),
)
