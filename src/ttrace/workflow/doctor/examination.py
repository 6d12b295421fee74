"""Examination of an installation: every measurement of `ttrace doctor`, one after the other."""

from __future__ import annotations

import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from ttrace.errors import TTraceError
from ttrace.report.health import AcceleratorHealth, Health, KernelHealth, TorchHealth, TorchrunHealth, TorchSupport
from ttrace.workflow.doctor.disk import measure_disk

PACKAGES = ("megatron-core", "transformers", "accelerate", "torchao", "deepspeed")
"""Packages whose version may matter; none of them is imported."""


def examine(folder: Path, timeout: float) -> Health:
    """Measure everything; traces would be written into this folder, and a launch may take `timeout` seconds."""
    torch_error = _find_import_error()
    can_import = not torch_error
    return Health(
        platform=platform.platform(),
        versions=_read_versions(),
        torch=_describe_torch() if can_import else None,
        torch_error=torch_error,
        kernels=_describe_kernels() if can_import else None,
        accelerators=_find_accelerators() if can_import else None,
        disk=measure_disk(folder),
        torchrun=_launch(timeout) if can_import else None,
    )


def _read_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"ttrace": _read_version("torch-ttrace"), "python": platform.python_version()}
    return versions | {name: _read_version(name) for name in PACKAGES}


def _read_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _find_import_error() -> str:
    """Import torch; return why that fails, or an empty text."""
    try:
        import torch  # noqa: F401  # only whether it can be imported
    except Exception as error:  # a library that it loads may be missing or too old, which can raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _describe_torch() -> TorchHealth:
    import torch

    from ttrace.compat.torch import parse_release
    from ttrace.torch_limits import list_limits

    version = str(torch.__version__)
    return TorchHealth(version, TorchSupport.of(parse_release(version)), list_limits(version))


def _describe_kernels() -> KernelHealth:
    from ttrace.judge.engine import count_cores
    from ttrace.values.kernels.library import TORCH, choose_kernels, list_variants

    try:
        chosen, runnable = choose_kernels(), list_variants()
    except (OSError, TTraceError) as error:
        return KernelHealth("", (), count_cores(), str(error))
    return KernelHealth(TORCH if chosen is None else chosen.variant, runnable, count_cores())


def _find_accelerators() -> AcceleratorHealth:
    """Find accelerators; torch warns if there is one that it cannot use."""
    import torch

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if hasattr(torch, "accelerator"):
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            kind = None if device is None else device.type
        else:  # before 2.6
            kind = "cuda" if torch.cuda.is_available() else None
        names = () if kind is None else _name_devices(kind, torch.get_device_module(kind))
    return AcceleratorHealth(names, next((" ".join(str(one.message).split()) for one in raised), ""))


def _name_devices(kind: str, module: Any) -> tuple[str, ...]:
    """Name all devices of a kind; mps has no names, and one device."""
    count = module.device_count()
    name = getattr(module, "get_device_name", None)
    return tuple(f"{kind}:{i}" + (f" {name(i)}" if name else "") for i in range(count))


def _launch(timeout: float) -> TorchrunHealth:
    from ttrace.workflow.doctor.torchrun import measure_torchrun

    return measure_torchrun(timeout)
