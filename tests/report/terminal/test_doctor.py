"""The report of the doctor: one line for each fact, and for each problem what to do."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.health import HEALTHY, TORCH
from ttrace.compat.torch import Limit
from ttrace.report.health import (
    AcceleratorHealth,
    DiskHealth,
    Health,
    KernelHealth,
    TorchrunHealth,
    TorchrunStage,
    TorchSupport,
)
from ttrace.report.terminal import doctor


def shown(health: Health) -> list[str]:
    text = io.StringIO()
    doctor.show(Console(file=text, width=80), health)
    return text.getvalue().splitlines()


def line_of(health: Health, label: str) -> str:
    return next(line for line in shown(health) if line.startswith(f"  {label} ")).split(maxsplit=1)[1]


def test_a_healthy_installation_is_described_in_ten_lines() -> None:
    assert shown(HEALTHY) == [
        "✓ everything that TTrace needs works here",
        "  ttrace        0.2.0",
        "  python        3.11.7 on Linux-6.1-x86_64",
        "  torch         2.13.0+cpu: supported (TTrace supports 2.8 to 2.15)",
        "  packages      transformers 5.22.2; without megatron-core",
        "  off           nothing",
        "  kernels       avx2, 2 threads (this processor also runs sse2)",
        "  accelerators  none; TTrace has been tested on CPU only",
        "  disk          /data/runs, 63.3 GB free, writes 217.3 MB/s",
        "  torchrun      starts two ranks, and a gloo all-reduce works (7.5 s)",
    ]


def test_each_limit_of_torch_has_a_line_with_its_reason() -> None:
    limits = (Limit("FSDP2 on CPU", (2, 7), "it crashes in torch"), Limit("uneven shards", (2, 8), "it cuts evenly"))
    lines = shown(replace(HEALTHY, torch=replace(TORCH, version="2.6.0", support=TorchSupport.PARTIAL, limits=limits)))
    assert lines[3] == "  torch         2.6.0: partly supported (TTrace supports 2.8 to 2.15 fully)"
    assert lines[5:7] == [
        "  off           FSDP2 on CPU: it crashes in torch (before torch 2.7)",
        "                uneven shards: it cuts evenly (before torch 2.8)",
    ]


def test_a_newer_torch_is_called_untested() -> None:
    health = replace(HEALTHY, torch=replace(TORCH, version="2.16.0", support=TorchSupport.UNTESTED))
    assert line_of(health, "torch") == "2.16.0: untested: the newest version that TTrace was tested with is 2.15"


def test_kernels_that_are_not_there_or_not_wanted_are_told_apart() -> None:
    absent = replace(HEALTHY, kernels=KernelHealth("torch", (), 1))
    assert line_of(absent, "kernels").startswith("none: torch computes instead, more slowly; 1 thread. To get them,")
    unwanted = replace(HEALTHY, kernels=KernelHealth("torch", ("avx2", "sse2"), 2))
    assert line_of(unwanted, "kernels") == "torch, 2 threads (this processor also runs avx2, sse2)"


def test_accelerators_are_named_and_the_state_of_tests_is_said() -> None:
    two = AcceleratorHealth(("cuda:0 H100", "cuda:1 H100"))
    assert line_of(replace(HEALTHY, accelerators=two), "accelerators") == (
        "cuda:0 H100, cuda:1 H100; TTrace has been tested on CPU only"
    )
    old = AcceleratorHealth((), "the driver is too old")
    assert line_of(replace(HEALTHY, accelerators=old), "accelerators") == (
        "none (torch says: the driver is too old); TTrace has been tested on CPU only"
    )


PROBLEMS = [
    (
        replace(HEALTHY, torch=None, torch_error="OSError: libcudart.so.12", kernels=None, torchrun=None),
        f"✗ torch cannot be imported: OSError: libcudart.so.12. Install PyTorch 2.8 to 2.15 for {sys.executable}.",
    ),
    (
        replace(HEALTHY, torch=replace(TORCH, version="2.5.1", support=TorchSupport.TOO_OLD)),
        "✗ torch 2.5.1 is too old. Install PyTorch 2.8 to 2.15.",
    ),
    (
        replace(HEALTHY, kernels=KernelHealth("", (), 2, "there are no kernels 'x' here; known are torch.")),
        "✗ the C kernels cannot be used: there are no kernels 'x' here; known are torch. Unset TTRACE_KERNELS, or set "
        "it to torch to compute without them.",
    ),
    (
        replace(HEALTHY, disk=DiskHealth(HEALTHY.disk.folder, 0, None, "Permission denied")),
        "✗ /data/runs cannot be written: Permission denied. Choose another folder with --out.",
    ),
    (
        replace(HEALTHY, torchrun=TorchrunHealth("", TorchrunStage.MISSING)),
        "✗ torchrun is not on PATH. Activate the environment in which PyTorch is installed, or write "
        "`python -m torch.distributed.run` in place of `torchrun` in your commands.",
    ),
    (
        replace(HEALTHY, torchrun=TorchrunHealth("/a/torchrun", TorchrunStage.FOREIGN, 3.0, "/a/python")),
        f"✗ /a/torchrun runs /a/python, which has no ttrace. Activate the environment of {sys.executable}, or install "
        "TTrace in the other one.",
    ),
]


@pytest.mark.parametrize(("health", "line"), PROBLEMS)
def test_each_problem_says_what_to_do_next(health: Health, line: str) -> None:
    lines = shown(health)
    assert lines[0] == "✗ something that TTrace needs does not work here"
    assert lines[-2:] == [line, "next: fix this, then: ttrace doctor"]


@pytest.mark.parametrize("stage", [TorchrunStage.SILENT, TorchrunStage.STARTED])
def test_what_torchrun_said_follows_its_problem(stage: TorchrunStage) -> None:
    torchrun = TorchrunHealth("/a/torchrun", stage, 3.0, error="it ended with status 1\nRuntimeError: no route")
    lines = shown(replace(HEALTHY, torchrun=torchrun))
    assert lines[-4].startswith("✗ ")
    assert lines[-3:-1] == ["  | it ended with status 1", "  | RuntimeError: no route"]


@pytest.mark.parametrize("health", [HEALTHY, *(health for health, _ in PROBLEMS)])
def test_programs_get_the_same(health: Health) -> None:
    report = json.loads(json.dumps(doctor.as_json(health)))
    assert report["exit"] == health.exit
    assert [problem["name"] for problem in report["problems"]] == [problem.value for problem in health.problems]
    assert [f"✗ {problem['sentence']}" for problem in report["problems"]] == [
        line for line in shown(health)[1:] if line.startswith("✗ ")
    ]
    assert report["versions"]["torch"] == (health.torch.version if health.torch else None)
