"""Environment of a run, as far as it may explain a difference or make a trace stale.

It is made of environment variables, versions of packages, fingerprints of source files, and the settings of torch that
change how kernels round or in which order they sum. The module also knows which files are the script's own, that is
neither torch's, TTrace's nor Python's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ttrace.compat.torch import GENERATED_MODULE
from ttrace.patches import Patches
from ttrace.trace.seal import fingerprint_file

_PREFIXES = (
    *("ACCELERATE_", "CUBLAS", "CUDA", "CUDNN", "DEEPSPEED", "DS_", "FSDP_", "GLOO_", "HF_", "HIP", "HSA_", "MKL_"),
    *("MEGATRON", "NCCL", "NVIDIA_", "NVTE_", "OMP_", "PYTORCH", "RCCL", "ROCM", "TOKENIZERS_", "TORCH", "TRITON"),
    *("UCC_", "UCX_", "XLA"),
)
_LAUNCHERS = ("OMP_NUM_THREADS", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Variables that torchrun sets by itself, on one side only."""
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN")


def read_environment() -> dict[str, str]:
    """Read the variables that change how training computes, but none that looks like a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_LAUNCHERS) and not any(word in name for word in _SECRET)
    }


def read_versions() -> dict[str, str]:
    """Read the versions of Python, of TTrace, and of every installed and loaded package that has one."""
    versions = {"python": platform.python_version(), "ttrace": metadata.version("torch-ttrace")}
    targets = _find_targets(tuple(sys.path))
    for name, module in sorted(sys.modules.items()):
        if "." not in name and _is_installed(getattr(module, "__file__", None), targets):
            version = _read_version(name, getattr(module, "__dict__", {}))
            versions |= {name: version} if version else {}
    return versions


def _read_version(name: str, attributes: Mapping[str, object]) -> str | None:
    stated = attributes.get("__version__")  # getattr makes some modules warn
    if isinstance(stated, str):
        return stated
    with contextlib.suppress(metadata.PackageNotFoundError):  # packages that load lazily, such as transformers
        return metadata.version(name) if "__path__" in attributes else None
    return None


def fingerprint_sources() -> dict[str, str]:
    """Fingerprint every file that was loaded as a module; in installed packages only files that show the version."""
    return {
        path: fingerprint for path in sorted(set(_list_loaded_files())) if (fingerprint := _fingerprint_loaded(path))
    }


@functools.cache
def _fingerprint_loaded(path: str) -> str:
    """Fingerprint a file once per process: the process runs what it loaded, even if the file is changed later."""
    return fingerprint_file(Path(path))


def _list_loaded_files() -> Iterator[str]:
    targets = _find_targets(tuple(sys.path))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (path := _find_source(name, file, targets)) is not None:
            yield path


@functools.cache  # thousands of modules are loaded
def _find_source(name: str, file: str, targets: tuple[str, ...]) -> str | None:
    """Return the file of a module that is fingerprinted; None if it is not."""
    is_installed = _is_installed(file, targets)
    is_standard = file.startswith(_STANDARD) and not is_installed
    shows_version = not is_installed or "." not in name or name.endswith("version")
    if name == GENERATED_MODULE or not shows_version or is_standard:
        return None
    with contextlib.suppress(OSError):  # the script may have removed the folder that it is in
        return str(Path(file).absolute())
    return None


def _is_installed(file: str | None, targets: tuple[str, ...]) -> bool:
    """Whether the file belongs to an installed package, which users do not edit; torch may be where it was built."""
    return file is not None and ("-packages" in file or file.startswith((_TORCH, *targets)))


@functools.cache
def _find_targets(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Find the folders into which packages were installed with `pip install --target`."""
    return tuple(f"{folder}{os.sep}" for folder in folders if folder and any(Path(folder).glob("*.dist-info")))


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


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
        warnings.simplefilter("ignore")  # some flags warn that they have a newer name
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


TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120  # compared with the beginnings of paths
OWN = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(f"{path}{os.sep}" for path in (*site.getsitepackages(), sysconfig.get_path("purelib")))


def find_line(function: Any) -> str:
    """Find the file and line where a function is defined; empty for one that is not written in Python."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


@cache
def is_of_script(path: str) -> bool:
    """Whether the author of the script can change this file: it is not torch's, TTrace's, Python's own, or generated.

    `typing_extensions` does not count either: it wraps deprecated functions of torch.
    """
    if path.startswith((TORCH, OWN, "<")) or "torchinductor_" in path or path.endswith("typing_extensions.py"):
        return False
    return path.startswith(_INSTALLED) or not path.startswith(_STANDARD)
