"""transformers: the router's scores get the gradient of this rank's experts only.

Under expert parallelism each rank weights the outputs of its own experts, so that every rank has a part of the scores'
gradient. Nothing summed them before pull request 48205, and the router's copies were updated differently.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from unittest import mock

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.candidate import Candidate
from zoo.harness.hugging import MASKED, Case


def unsummed(_candidate: Candidate) -> AbstractContextManager[object]:
    from transformers.distributed import expert_parallel

    passed_on = SimpleNamespace(apply=lambda scores, _group: scores)
    return mock.patch.object(expert_parallel, "_AllReduceBackward", passed_on)


BUG = Bug(
    tier=Tier.T2,
    topic=Topic.MISSING_COMMUNICATION,
    package="transformers before pull request 48205",
    sources=("https://github.com/huggingface/transformers/pull/48205",),
    case=Case("qwen3_moe", "masked", MASKED),
    patch=unsummed,
    expected=Expected("model.layers.1.mlp.gate", "grad_output", "missing all-reduce", "tp"),
)
