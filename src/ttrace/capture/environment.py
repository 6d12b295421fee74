"""Environment of a run, as far as it may explain a difference or make a trace stale."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

from ttrace.compat.torch import GENERATED_MODULE
from ttrace.trace.storage.fingerprint import fingerprint_file

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
    """Fingerprint every file that was loaded as a module; of an installed package only files that show its version."""
    return {
        path: fingerprint for path in sorted(set(_list_loaded_files())) if (fingerprint := _fingerprint_loaded(path))
    }


@functools.cache
def _fingerprint_loaded(path: str) -> str:
    """Fingerprint a file once per process: it runs what it has loaded, whatever the file is changed to."""
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
    """Whether the file belongs to a package that nobody edits; torch may also lie where it was built."""
    return file is not None and ("-packages" in file or file.startswith((_TORCH, *targets)))


@functools.cache
def _find_targets(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Find the folders into which packages were installed with `pip install --target`."""
    return tuple(f"{folder}{os.sep}" for folder in folders if folder and any(Path(folder).glob("*.dist-info")))


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
