"""What is measured decides what is a problem, and the exit code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.health import HEALTHY, TORCH
from ttrace.report.health import (
    DiskHealth,
    Health,
    HealthProblem,
    KernelHealth,
    Release,
    TorchrunHealth,
    TorchrunStage,
    TorchSupport,
)


@pytest.mark.parametrize(
    ("release", "support"),
    [
        ((1, 13), TorchSupport.TOO_OLD),
        ((2, 5), TorchSupport.TOO_OLD),
        ((2, 6), TorchSupport.PARTIAL),
        ((2, 7), TorchSupport.PARTIAL),
        ((2, 8), TorchSupport.SUPPORTED),
        ((2, 15), TorchSupport.SUPPORTED),
        ((2, 16), TorchSupport.UNTESTED),
        ((3, 0), TorchSupport.UNTESTED),
    ],
)
def test_the_version_of_torch_decides_its_support(release: Release, support: TorchSupport) -> None:
    assert TorchSupport.of(release) is support


@pytest.mark.parametrize("support", [TorchSupport.PARTIAL, TorchSupport.SUPPORTED, TorchSupport.UNTESTED])
def test_what_works_is_no_problem(support: TorchSupport) -> None:
    health = replace(HEALTHY, torch=replace(TORCH, support=support))
    assert (health.problems, health.exit) == ((), 0)


@pytest.mark.parametrize(
    ("health", "problem"),
    [
        (replace(HEALTHY, torch=None, torch_error="no"), HealthProblem.TORCH_BROKEN),
        (replace(HEALTHY, torch=replace(TORCH, support=TorchSupport.TOO_OLD)), HealthProblem.TORCH_TOO_OLD),
        (replace(HEALTHY, kernels=KernelHealth("", (), 2, "no")), HealthProblem.KERNELS_BROKEN),
        (replace(HEALTHY, disk=DiskHealth(HEALTHY.disk.folder, error="no")), HealthProblem.DISK_NOT_WRITABLE),
        *(
            (replace(HEALTHY, torchrun=TorchrunHealth("torchrun", stage)), problem)
            for stage, problem in [
                (TorchrunStage.MISSING, HealthProblem.TORCHRUN_MISSING),
                (TorchrunStage.SILENT, HealthProblem.TORCHRUN_SILENT),
                (TorchrunStage.FOREIGN, HealthProblem.TORCHRUN_FOREIGN),
                (TorchrunStage.STARTED, HealthProblem.ALL_REDUCE_FAILED),
            ]
        ),
    ],
)
def test_what_is_needed_and_does_not_work_is_a_problem(health: Health, problem: HealthProblem) -> None:
    assert (health.problems, health.exit) == ((problem,), 2)
