"""megatron-core 0.6.0: each tensor-parallel rank has the router's auxiliary loss of all tokens, and they are summed.

Under sequence parallelism the router's gradients are summed over tp, as each rank has those of its own tokens. The
auxiliary loss is computed from the gathered tokens on every rank and not divided, so that it counts tp times.

The loss itself is right, and so is all that does not depend on the router. The router is pushed towards balance tp
times as hard as was asked for, so that another number of ranks is another training. TTrace traces the loss of the
router as a site, so it reports the factor there, and not at all tensors that follow. The clean side has no auxiliary
loss: the gradients of the loss alone are right, on as many ranks and in the same release.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.megatron.released import moe

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="megatron-core 0.5.0-0.6.0",
    sources=("https://github.com/NVIDIA/Megatron-LM/commit/cac8d1a3f0",),
    case=moe(version="0.6.0", tp=2, sp=True),
    clean_case=moe(version="0.6.0", tp=2, sp=True, aux_loss=0.0),
    expected=Expected("decoder.layers.1.mlp.router", "loss", "double reduction", "tp"),
)
