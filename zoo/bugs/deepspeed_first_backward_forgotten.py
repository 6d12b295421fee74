"""DeepSpeed, ZeRO-1 and 2: of two backward passes before a step, the first is forgotten.

Without accumulation every backward pass is taken for the last one of a step, and what was kept before it is dropped.
ZeRO-3 counts from the step.

open-instruct met it: it accumulated by itself, with the engine set to one microbatch, and lost all of a step but
its last one. The way around is `set_gradient_accumulation_boundary`, as on the clean side. Losses and activation
gradients are right; only the gradients that the optimizer gets show it.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.OPTIMIZER,
    package="deepspeed 0.19.8",
    sources=("https://github.com/allenai/open-instruct/pull/1498",),
    case=Script("deepspeed_engine.py", candidate="--stage 2 --by-hand"),
    clean_case=Script("deepspeed_engine.py", candidate="--stage 2 --by-hand --stated"),
    expected=Expected("first", "param_grad", "microbatches"),
    since=(2, 13),
)
