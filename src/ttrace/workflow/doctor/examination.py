"""Examination of an installation: every measurement of `ttrace doctor`, one after the other.

Among them are the free space and the speed of the disk for traces, and a launch of two ranks by torchrun.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
import uuid
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from ttrace.attach import PLAN_VARIABLE
from ttrace.errors import TTraceError
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
from ttrace.workflow.doctor import rank
from ttrace.workflow.folder import find_existing
from ttrace.workflow.launch import Launch, LaunchResult

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

    from ttrace.compat.torch import list_limits, parse_release

    version = str(torch.__version__)
    return TorchHealth(version, TorchSupport.of(parse_release(version)), list_limits(version))


def _describe_kernels() -> KernelHealth:
    from ttrace.judge.engine import count_cores
    from ttrace.values.kernels.choice import list_variants, name_variant

    try:
        return KernelHealth(name_variant(), list_variants(), count_cores())
    except (OSError, TTraceError) as error:
        return KernelHealth("", (), count_cores(), str(error))


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

    return measure_torchrun(timeout)


_BLOCK, _NUM_BLOCKS = 8 << 20, 8
_LONGEST = 5.0
"""Seconds after which a slow disk is known well enough."""


def measure_disk(folder: Path) -> DiskHealth:
    """Measure the disk of a folder that may not exist yet; whatever happens, no file is left."""
    existing = find_existing(folder)
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return DiskHealth(folder, error=error.strerror or str(error))
    try:
        return DiskHealth(folder, free, _measure_speed(existing))
    except OSError as error:
        return DiskHealth(folder, free, error=error.strerror or str(error))


def _measure_speed(folder: Path) -> float:
    block = os.urandom(_BLOCK)  # a file system may compress what is regular
    start, num_bytes = time.monotonic(), 0
    # Without a name where the system allows it: the file then ends with this process, however that ends.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_NUM_BLOCKS):
            num_bytes += file.write(block)
            os.fsync(file.fileno())
            if time.monotonic() - start > _LONGEST:
                break
        return num_bytes / max(time.monotonic() - start, 1e-9)


_OPTIONS = ("--standalone", "--nproc-per-node", "2")


def measure_torchrun(timeout: float) -> TorchrunHealth:
    """Launch two ranks that make an all-reduce, by the torchrun that users' commands find.

    Every process has ended when this returns.
    """
    path = shutil.which("torchrun")
    if path is None:
        return TorchrunHealth("", TorchrunStage.MISSING)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="ttrace-doctor-") as folder:
            error = _find_launch_error(path, Path(folder), timeout)
            return _judge(path, time.monotonic() - start, error, sorted(Path(folder).glob("rank-*.json")))
    except (OSError, TTraceError) as failure:
        return TorchrunHealth(path, TorchrunStage.SILENT, time.monotonic() - start, error=str(failure))


def _find_launch_error(torchrun: str, folder: Path, timeout: float) -> str:
    """Launch the ranks and wait; return an empty text if they succeeded."""
    command, log = (torchrun, *_OPTIONS, rank.__file__, str(folder)), folder / "log"
    # All processes of a launch carry its id, so that they can be ended. The plan that it names does not exist.
    environment = {**os.environ, PLAN_VARIABLE: f"{folder}#{uuid.uuid4().hex}"}
    start = time.monotonic()
    with log.open("wb") as output:
        running = Launch(command, output, environment)
        try:
            status: int | None = running.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            running.close()
    if status == 0:
        return ""
    ended = f"it did not end within {timeout:g} s" if status is None else f"it ended with status {status}"
    output_end = LaunchResult(command, status or 0, time.monotonic() - start, log).find_error()
    return f"{ended}\n{output_end}".strip()


def _judge(path: str, seconds: float, error: str, reports: list[Path]) -> TorchrunHealth:
    ranks = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    if not ranks:
        silent = error or "it ended with status 0, but did not run its script"
        return TorchrunHealth(path, TorchrunStage.SILENT, seconds, error=silent)
    python = ranks[0]["python"]
    if not all(about["has_ttrace"] for about in ranks):
        return TorchrunHealth(path, TorchrunStage.FOREIGN, seconds, python, error)
    stage = TorchrunStage.STARTED if error else TorchrunStage.WORKS
    return TorchrunHealth(path, stage, seconds, python, error)
