"""Drift: after a resume, the loader gives a batch a second time.

A loader counted its batches from zero after each resume within an epoch, and so skipped too few of them: what follows a
resume was trained on before. Here the step after the resume has the batch of the step before it.
"""

from __future__ import annotations

from zoo.bug import Bug, Expected, Tier, Topic
from zoo.harness.watched import Watched, WatchedTraining


def patch(training: WatchedTraining) -> None:
    training.read_batch = lambda step: training.read_own_batch(step - (step >= 7))


BUG = Bug(
    tier=Tier.T3,
    topic=Topic.DRIFT,
    package="KempnerForge",
    sources=(
        "https://github.com/KempnerInstitute/KempnerForge/issues/57",
        "https://github.com/allenai/open-instruct/pull/681",
    ),
    case=Watched(),
    patch=patch,
    expected=Expected(".", "data", "repeated data"),
)
