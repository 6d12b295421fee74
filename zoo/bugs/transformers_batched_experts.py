"""transformers: the batched way to compute experts gives the router a wrong gradient under expert parallelism.

With `batched_mm` a slot that another rank's expert answers for is computed by some expert of this rank and weighted by
zero. That drops it from the output, but the weight's own gradient is not zero. The loss is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ttrace.judge.verdict import CauseName
from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.hugging import MASKED, Case

FIXED = "sample_weights = sample_weights.masked_fill(sentinel_mask, 0.0)"


@contextmanager
def without_the_fix(_candidate: Candidate) -> Iterator[None]:
    from transformers.integrations import moe

    source = inspect.getsource(moe.batched_mm_experts_forward)
    assert FIXED in source
    scope: dict[str, Any] = dict(vars(moe))
    exec(source.replace(FIXED, "pass"), scope)
    functions: Any = moe.ALL_EXPERTS_FUNCTIONS
    right = functions["batched_mm"]
    functions["batched_mm"] = scope["batched_mm_experts_forward"]
    try:
        yield
    finally:
        functions["batched_mm"] = right


BUG = Bug(
    tier=Tier.T2,
    topic=Topic.DATA,
    package="transformers before pull request 48689",
    sources=(
        "https://github.com/huggingface/transformers/issues/48687",
        "https://github.com/huggingface/transformers/pull/48689",
    ),
    case=Case("qwen3_moe", "masked", MASKED, experts="batched_mm"),
    patch=without_the_fix,
    expected=Expected("model.layers.1.mlp.experts", "grad_input", CauseName.UNEXPLAINED.value),
)
