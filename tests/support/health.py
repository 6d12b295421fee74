"""A healthy installation, of which tests change parts."""

from __future__ import annotations

from pathlib import Path

from ttrace.report.health import (
    AcceleratorHealth,
    DiskHealth,
    Health,
    KernelHealth,
    TorchHealth,
    TorchrunHealth,
    TorchrunStage,
    TorchSupport,
)

TORCH = TorchHealth("2.13.0+cpu", TorchSupport.SUPPORTED, ())
HEALTHY = Health(
    platform="Linux-6.1-x86_64",
    versions={"ttrace": "0.2.0", "python": "3.11.7", "megatron-core": None, "transformers": "5.22.2"},
    torch=TORCH,
    torch_error="",
    kernels=KernelHealth("avx2", ("avx2", "sse2"), 2),
    accelerators=AcceleratorHealth(()),
    disk=DiskHealth(Path("/data/runs"), 63_300_000_000, 217_300_000.0),
    torchrun=TorchrunHealth("/usr/bin/torchrun", TorchrunStage.WORKS, 7.5, "/usr/bin/python"),
)
