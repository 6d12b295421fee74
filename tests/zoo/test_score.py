"""Known bugs are found where they are and for the right reason, and neither their clean sides nor look-alikes accused.

Every submission runs a part of the reported bugs in which every tier, topic and cause occurs; `--all` runs all,
and so does `python -m zoo evaluate` each night.
"""

from __future__ import annotations

import pytest

from ttrace.judge.verdict import CauseName
from zoo import controls
from zoo.bug import Topic, bugs
from zoo.score import score

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]

PART = (
    "embedding-mask-rebased",
    "recompute-stale-input",
    "cp-loss-scaled",
    "fp8-amax-group",
    "fp8-weight-cache",
    "zero-update-not-gathered",
    "pp-layer-dropped",
    "tp-overlap-shared-buffer",
    "cp-positions-not-cut",
    "ddp-unused-parameter",
    "learning-rates-collapse",
    "expert-bias-on-every-rank",
    "local-map-uneven",
    "loss-parallel-log-softmax",
    "norm-of-own-stage",
    "router-init-from-rank-stream",
    "optimizer-state-stepped-before",
    "zero-tied-embeddings",
    "transformers-norms-reduced-again",
    "transformers-router-not-summed",
    "megatron-aux-loss-of-local-tokens",
    "megatron-latent-keys-not-summed",
    "transformers-unshifted-labels-counted",
    "transformers-router-softmaxed-twice",
    "lora-counted-on-every-rank",
    "checkpoint-norms-shifted-twice",
    "checkpoint-moments-in-bf16",
    "port-norm-eps",
    "port-rope-theta",
    "port-vocabulary-padded",
    "drift-not-broadcast",
    "drift-same-samples",
    "drift-batch-twice",
    "drift-norms-frozen-in-bf16",
    "inference-temperature",
    "hidden-replicas-not-broadcast",
    "hidden-same-seed",
    "hidden-fan-in-of-shard",
    "hidden-gradients-not-zeroed",
)
"""Every tier, topic and cause, every number of ranks and every launcher."""
NOT_NAMED = {"transposed"}
"""Causes that are never named where they are expected, as the score says."""


def test_the_part_has_everything() -> None:
    chosen = [bugs()[name] for name in PART]
    assert {bug.tier for bug in chosen} == {bug.tier for bug in bugs().values()}
    assert {bug.topic for bug in chosen} == set(Topic)
    every_cause = {bug.expected.cause for bug in bugs().values()} - {CauseName.UNEXPLAINED.value}
    assert {bug.expected.cause for bug in chosen} >= every_cause - NOT_NAMED
    assert {type(bug.case) for bug in chosen} == {type(bug.case) for bug in bugs().values()}


def controls_in_ci() -> list[controls.Control]:
    """Every other one: each kind once, in turn in float32 and in bfloat16."""
    return controls.few()[::2]


def test_every_kind_of_control_is_in_ci() -> None:
    kinds, every = (
        [one.name.removesuffix("-float32").removesuffix("-bfloat16") for one in some]
        for some in (controls_in_ci(), controls.few())
    )
    assert sorted(kinds) == sorted(set(kinds))
    assert {kind for kind in every if not kind.startswith("fp8")} <= set(kinds)


@pytest.mark.usefixtures("warm_commands")
def test_bugs_are_found_and_their_clean_sides_are_not_accused(request: pytest.FixtureRequest) -> None:
    names = list(bugs()) if request.config.getoption("--all") else PART
    result = score(names, print)
    print(result)
    assert [line.name for line in result.lines if not line.is_detected] == []
    assert [line.name for line in result.lines if not line.is_clean] == []
    assert result.passes, result


def test_controls_are_not_accused(request: pytest.FixtureRequest) -> None:
    result = controls.run(controls.every() if request.config.getoption("--all") else controls_in_ci(), print)
    print(result)
    assert result.accused == {}
