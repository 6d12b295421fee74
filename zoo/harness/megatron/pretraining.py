"""Run a script of Megatron-LM, such as pretrain_gpt.py, on CPU: `megatron.training` needs more than the core does.

TTRACE_MEGATRON_LM=CHECKOUT torchrun --nproc-per-node 2 -m zoo.harness.megatron.pretraining pretrain_gpt.py ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zoo.harness.megatron import standins
from zoo.harness.megatron.install import ABSENT, Replaced, Wrapped, install, replace, supply

CHECKOUT = "TTRACE_MEGATRON_LM"
"""The variable with the path of a checkout of Megatron-LM at the tag of the wheel, core_v0.16.1."""
DEVICE = SimpleNamespace(name="cpu", total_memory=1 << 34, major=8, minor=0)
_GPU = "scripts ask what GPU there is"
_FACTORIES = ("arange", "empty", "full", "rand", "randint", "randn")
REPLACED = (
    Replaced("torch.cuda.is_available", lambda: True, _GPU),
    Replaced("torch.cuda.device_count", lambda: 8, _GPU),
    Replaced("torch.cuda.set_device", standins.nothing, _GPU),
    Replaced("torch.cuda.get_device_capability", lambda *_: (8, 0), _GPU),
    Replaced("torch.cuda.get_device_properties", lambda *_: DEVICE, _GPU),
    Replaced("torch.cuda.memory_allocated", lambda *_: 0, "scripts print how much memory is in use"),
    Replaced("torch.cuda.max_memory_allocated", lambda *_: 0, "the same"),
    Replaced("torch.cuda.memory_reserved", lambda *_: 0, "the same"),
    Replaced("torch.cuda.max_memory_reserved", lambda *_: 0, "the same"),
    Replaced("torch.cuda.memory_stats", lambda *_: {}, "the same"),
    Replaced("torch.cuda.empty_cache", standins.nothing, "there is no cache of the GPU"),
    *(Wrapped(f"torch.{name}", standins.on_cpu, "there is one device, the CPU") for name in _FACTORIES),
)
COMPILED = (
    Replaced("megatron.core.datasets.utils.compile_helpers", standins.nothing, "the wheel has them compiled"),
    Replaced("megatron.legacy.fused_kernels.load", standins.nothing, "they are kernels for a GPU"),
)


class Language(SimpleNamespace):
    """`triton.language`, in which kernels are declared that nobody calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return int


def declare(kernel: Any = None, **_: Any) -> Any:
    """`triton.jit`, with arguments and without."""
    return kernel if kernel is not None else declare


def install_training() -> None:
    """Make `import megatron.training` work, from the checkout, on CPU."""
    sys.path.insert(0, os.environ[CHECKOUT])
    install()
    for absent in ABSENT:
        if absent.module.startswith("triton"):
            supply(absent)
    triton: Any = sys.modules["triton"]
    triton.jit, triton.cdiv = declare, lambda a, b: -(-a // b)
    triton.language = sys.modules["triton.language"] = Language()  # type: ignore[assignment]
    for replaced in (*REPLACED, *COMPILED):
        replace(replaced)
    torch.compiler.set_stance("force_eager")  # Megatron compiles small functions


if __name__ == "__main__":
    install_training()
    sys.argv = [str(Path(os.environ[CHECKOUT]) / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
