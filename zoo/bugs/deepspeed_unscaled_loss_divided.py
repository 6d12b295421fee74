"""DeepSpeed 0.18.3: `backward(loss, scale_wrt_gas=False)` divides gradients by the accumulation steps all the same.

The flag says that the loss is divided already. The loss is left alone, but a hook on the engine's outputs divides the
gradient. 0.18.4 asks the flag there, too.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

ARGUMENTS = "--stage 2 --items"
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="deepspeed 0.18.3",
    sources=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7724",
        "https://github.com/huggingface/accelerate/issues/3877",
    ),
    case=Script("deepspeed_zero.py", "--items", ARGUMENTS, num_ranks=1, candidate_wheels=("deepspeed==0.18.3",)),
    clean_case=Script("deepspeed_zero.py", "--items", ARGUMENTS, num_ranks=1, candidate_wheels=("deepspeed==0.19.5",)),
    expected=Expected(".", "grad_output", "constant factor", "mb"),
    since=(2, 13),
)
