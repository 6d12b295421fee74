"""torch: the gradient of RReLU is wrong where activations are recomputed by hooks, the default of `checkpoint`.

RReLU saves its random slopes for backward before it fills them in. Recomputation takes what is saved, and stops as soon
as it has all of it: then the slopes are not drawn yet, and backward multiplies by whatever was in that memory. The
forward is right, and so is the older way to recompute, which runs to the end (`use_reentrant=True`).

Both sides draw the same slopes, so TTrace can judge what follows from them. Dropout is not affected: it draws first,
and saves what it drew.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.scripts import Script

BUG = Bug(
    tier=Tier.T1,
    topic=Topic.RANDOM,
    package="torch",
    sources=("https://github.com/pytorch/pytorch/issues/193671",),
    case=Script("recompute.py", "", "--recompute by-hooks", num_ranks=1),
    clean_case=Script("recompute.py", "", "--recompute reentrant", num_ranks=1),
    expected=Expected("slope", "grad_input", "unexplained"),
    since=(2, 13),
)
