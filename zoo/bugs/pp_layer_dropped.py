"""Pipeline parallelism: layers that cannot be divided evenly among the stages are dropped.

Megatron-core divided the number of layers by that of stages and by that of chunks and kept the integer: of 80 layers
on 16 x 2 chunks 64 were trained (issue 468), of 30 on 4 stages 28 (issue 1304). It is refused since core 0.11.0.

The model trains with fewer layers than requested, without a warning. Here one layer of four is lost on its way to
a stage; `megatron-pp-layer-dropped` is a release that does it.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.breaking import layer_lost
from zoo.harness.small import small

BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DATA,
    package="megatron-core 0.3.0-0.10.0",
    sources=("https://github.com/NVIDIA/Megatron-LM/issues/468", "https://github.com/NVIDIA/Megatron-LM/issues/1304"),
    paper=10,
    case=small("pp-gpipe"),
    patch=layer_lost,
    is_early=True,
    expected=Expected(".", "output", "missing modules", line='del layers["2"]', operation="layers"),
)
