"""DeepSpeed 0.19.6 to 0.19.8: `scale_wrt_gas=False` is ignored for a loss that is the very output of the engine.

A hook on each output divides its gradient, unless `backward` has marked the graph. It marks the graph by a hook on the
loss; if the loss is an output, the dividing hook is there first. ZeRO multiplies the loss before, which hides this.

TTrace found this one: docs/found/deepspeed-scale-wrt-gas.md has a script for eight releases. The clean side is the
release before.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

ARGUMENTS = "--stage 0 --items"
BUG = Bug(
    tier=Tier.T1,
    topic=Topic.SCALING,
    package="deepspeed 0.19.6-0.19.8",
    sources=("https://github.com/deepspeedai/DeepSpeed/pull/8245",),
    case=Script("deepspeed_zero.py", "--items", ARGUMENTS, num_ranks=1),
    clean_case=Script("deepspeed_zero.py", "--items", ARGUMENTS, num_ranks=1, candidate_wheels=("deepspeed==0.19.5",)),
    expected=Expected(".", "grad_output", "constant factor", "mb"),
    since=(2, 13),
)
