"""Search for the cause of a wrong tensor, and the list of all causes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ttrace.errors import SketchError
from ttrace.judge.causes import DETECTORS
from ttrace.judge.causes.evidence import Detector, Evidence, KnownCause
from ttrace.judge.verdict import Cause, CauseName, Comparison
from ttrace.trace.reader import Trace

_FROM_FINDINGS = (
    KnownCause(
        CauseName.MIS_SCALED,
        "all tensors of a kind, or one of them, are off by a factor that is smaller than rounding errors",
        unproven="no entry is that small; tests/judge/tolerance/test_scale.py",
    ),
    KnownCause(
        CauseName.MODULE_SETTINGS,
        "modules of one class of torch have other settings: the rate of dropout, momentum, eps, training mode",
        bug="other-dropout",
    ),
    KnownCause(
        CauseName.RECOMPUTE, "recomputation gives other values than the first forward", bug="recomputed-otherwise"
    ),
    KnownCause(
        CauseName.SKIPPED,
        "the candidate has modules that never ran, and the reference ran them",
        unproven="every entry that leaves out a module also lacks it; tests/judge/findings/test_origins.py",
    ),
    KnownCause(
        CauseName.NOT_BROADCAST,
        "ranks that hold replicas of a parameter started with their own values",
        bug="hidden-replicas-not-broadcast",
    ),
    KnownCause(
        CauseName.SAME_SEED, "ranks that hold parts of a parameter started with the same values", bug="hidden-same-seed"
    ),
    KnownCause(
        CauseName.SHARD_FAN_IN,
        "the spread of initial values was computed from the size of a shard",
        bug="hidden-fan-in-of-shard",
    ),
    KnownCause(
        CauseName.STALE_GRADIENTS,
        "gradients of an earlier step were still there before a step",
        bug="hidden-gradients-not-zeroed",
    ),
    KnownCause(CauseName.MISSING_MODULES, "modules or parameters that only one side has", bug="layer-lost"),
    KnownCause(CauseName.UNEXPLAINED, "no known pattern explains the difference", bug="cp-keys-gathered-along-heads"),
)
"""Causes that no detector finds: `find_cause` and judge/findings name them."""


def find_cause(
    comparison: Comparison, reference: Trace, candidate: Trace, detectors: Sequence[Detector] = DETECTORS
) -> Cause:
    """Find out why a tensor probably is wrong, by the first of the detectors that finds a cause."""
    if comparison.id.kind.is_recompute:
        return Cause(CauseName.RECOMPUTE, "recomputation gives other values than the first forward did")
    evidence = Evidence.of(comparison, reference, candidate)
    if evidence is not None:
        for detector in detectors:
            with suppress(SketchError):  # a detector that needs values finds nothing in sketches
                found = detector(evidence)
                if found is not None:
                    return found
        if evidence.is_too_large:
            words = f"patterns are not looked for along a dim of {max(evidence.reference.shape)} indices"
            return Cause(CauseName.UNEXPLAINED, f"too large to diagnose: {words}")
    return Cause(CauseName.UNEXPLAINED, "no known pattern explains the difference")


def all_causes() -> tuple[KnownCause, ...]:
    """Return every cause: those that detectors find, in their order, and those that `find_cause` and findings name."""
    return (*DETECTORS, *_FROM_FINDINGS)
