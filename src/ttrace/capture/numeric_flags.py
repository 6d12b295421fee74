"""Settings of torch that change how kernels round, or in which order they sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ttrace.patches import Patches

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""With this value cuBLAS sums in the same order each time; it is read when a process first uses cuBLAS."""

_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_FLAGS: dict[str, Callable[[], object]] = {
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: _cuda.matmul.allow_tf32,
    "cuda.matmul.fp32_precision": lambda: _cuda.matmul.fp32_precision,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: _cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: _cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cudnn.allow_tf32": lambda: _cudnn.allow_tf32,
    "cudnn.benchmark": lambda: _cudnn.benchmark,
    "cudnn.deterministic": lambda: _cudnn.deterministic,
    "flash attention": lambda: _cuda.flash_sdp_enabled(),
    "memory-efficient attention": lambda: _cuda.mem_efficient_sdp_enabled(),
    "cuDNN attention": lambda: _cuda.cudnn_sdp_enabled(),
    "math attention": lambda: _cuda.math_sdp_enabled(),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "default dtype": torch.get_default_dtype,
}


def read_flags() -> dict[str, str]:
    """Read the flags as they are now, and the device; a flag that this torch does not have is left out."""
    flags = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of flags that have a newer name
        for name, read in _FLAGS.items():
            try:
                flags[name] = str(read()).removeprefix("torch.")
            except (AttributeError, RuntimeError):  # missing, or set by its newer name
                continue
        device = torch.accelerator.current_accelerator(check_available=True)
        flags["accelerator"] = "none" if device is None else _describe(device)
    return flags


def set_deterministic(patches: Patches) -> None:
    """Have torch choose deterministic kernels where it has them, until the patches are removed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    patches.on_remove(lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1]))
    for name, value in (("deterministic", True), ("benchmark", False)):
        own = getattr(_cudnn, name)
        setattr(_cudnn, name, value)
        patches.on_remove(lambda name=name, own=own: setattr(_cudnn, name, own))  # type: ignore[misc]


def _describe(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name()) if name is not None else device.type
