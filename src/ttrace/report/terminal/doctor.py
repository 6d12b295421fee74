"""Report of `ttrace doctor`: one line for each fact, then what is wrong and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from ttrace.report.facts import format_bytes
from ttrace.report.health import (
    FIRST_SUPPORTED,
    LAST_TESTED,
    OLDEST,
    AcceleratorHealth,
    DiskHealth,
    Health,
    HealthProblem,
    KernelHealth,
    Release,
    TorchHealth,
    TorchrunHealth,
    TorchrunStage,
    TorchSupport,
)

_WIDTH = 14
_NOT_PACKAGES = ("ttrace", "python")


def as_json(health: Health) -> dict[str, Any]:
    """Return the same facts for programs; what could not be measured is null."""
    return {
        "exit": health.exit,
        "problems": [
            {"name": problem.value, "sentence": _describe_problem(health, problem)} for problem in health.problems
        ],
        "platform": health.platform,
        "versions": {**health.versions, "torch": health.torch and health.torch.version},
        "torch": health.torch and _torch_as_json(health.torch),
        "torch_error": health.torch_error,
        "kernels": health.kernels and vars(health.kernels),
        "accelerators": health.accelerators and vars(health.accelerators),
        "disk": {**vars(health.disk), "folder": str(health.disk.folder)},
        "torchrun": health.torchrun and vars(health.torchrun),
    }


def show(console: Console, health: Health) -> None:
    """Print whether everything works, the facts line by line, and for each problem what to do."""
    console.print(_make_headline(health), soft_wrap=True)
    for label, line in _list_lines(health):
        console.print(Text.assemble((f"  {label:<{_WIDTH}}", "dim"), line), soft_wrap=True)
    for problem in health.problems:
        console.print(Text.assemble(("✗ ", "bold red"), _describe_problem(health, problem)), soft_wrap=True)
        for line in _list_output(health, problem):
            console.print(Text(f"  | {line}", "dim"), soft_wrap=True)
    if health.problems:
        console.print(Text.assemble(("next: ", "dim"), ("fix this, then: ttrace doctor", "bold")))


def _make_headline(health: Health) -> Text:
    if not health.problems:
        return Text.assemble(("✓ ", "bold green"), "everything that TTrace needs works here")
    return Text.assemble(("✗ ", "bold red"), "something that TTrace needs does not work here")


def _list_lines(health: Health) -> Iterator[tuple[str, str]]:
    yield "ttrace", health.versions["ttrace"] or "not installed: it runs from its sources"
    yield "python", f"{health.versions['python']} on {health.platform}"
    yield "torch", "cannot be imported" if health.torch is None else _describe_torch(health.torch)
    yield "packages", _describe_packages(health)
    if health.torch is not None:
        yield from _list_limits(health.torch)
    if health.kernels is not None:
        yield "kernels", _describe_kernels(health.kernels)
    if health.accelerators is not None:
        yield "accelerators", _describe_accelerators(health.accelerators)
    yield "disk", _describe_disk(health.disk)
    yield "torchrun", _describe_torchrun(health.torchrun)


def _describe_torch(torch: TorchHealth) -> str:
    words = {
        TorchSupport.TOO_OLD: f"too old: TTrace needs {_write(OLDEST)} or later",
        TorchSupport.PARTIAL: f"partly supported (TTrace supports {_SUPPORTED} fully)",
        TorchSupport.SUPPORTED: f"supported (TTrace supports {_SUPPORTED})",
        TorchSupport.UNTESTED: f"untested: the newest version that TTrace was tested with is {_write(LAST_TESTED)}",
    }
    return f"{torch.version}: {words[torch.support]}"


def _describe_packages(health: Health) -> str:
    packages = {name: version for name, version in health.versions.items() if name not in _NOT_PACKAGES}
    present = [f"{name} {version}" for name, version in packages.items() if version is not None]
    absent = [name for name, version in packages.items() if version is None]
    return "; ".join(
        [*([", ".join(present)] if present else []), *([f"without {', '.join(absent)}"] if absent else [])]
    )


def _list_limits(torch: TorchHealth) -> Iterator[tuple[str, str]]:
    if not torch.limits:
        yield "off", "nothing"
    for i, limit in enumerate(torch.limits):
        words = f"{limit.feature}: {limit.reason} (before torch {_write(limit.below)})"
        yield ("off" if i == 0 else ""), words


def _describe_kernels(kernels: KernelHealth) -> str:
    threads = f"{kernels.num_threads} {'thread' if kernels.num_threads == 1 else 'threads'}"
    if kernels.error:
        return "cannot be used"
    if not kernels.runnable:
        return f"none: torch computes instead, more slowly; {threads}. To get them, install TTrace with a C compiler"
    others = [name for name in kernels.runnable if name != kernels.variant]
    also = f" (this processor also runs {', '.join(others)})" if others else ""
    return f"{kernels.variant}, {threads}{also}"


def _describe_accelerators(accelerators: AcceleratorHealth) -> str:
    if accelerators.names:
        return f"{', '.join(accelerators.names)}; TTrace has been tested on CPU only"
    reason = f" (torch says: {accelerators.warning})" if accelerators.warning else ""
    return f"none{reason}; TTrace has been tested on CPU only"


def _describe_disk(disk: DiskHealth) -> str:
    free = "" if disk.free_bytes is None else f", {format_bytes(disk.free_bytes)} free"
    speed = (
        ", not writable" if disk.bytes_per_second is None else f", writes {format_bytes(int(disk.bytes_per_second))}/s"
    )
    return f"{disk.folder.absolute()}{free}{speed}"


def _describe_torchrun(torchrun: TorchrunHealth | None) -> str:
    if torchrun is None:
        return "not tried, because torch cannot be imported"
    if torchrun.stage is TorchrunStage.WORKS:
        return f"starts two ranks, and a gloo all-reduce works ({torchrun.seconds:.1f} s)"
    return f"does not work: {torchrun.path or 'not on PATH'}"


def _describe_problem(health: Health, problem: HealthProblem) -> str:
    """Make a sentence of what is wrong, and one of what to do."""
    return _SENTENCES[problem].format(
        supported=_SUPPORTED,
        python=sys.executable,
        torch=health.torch and health.torch.version,
        torch_error=health.torch_error.rstrip("."),
        kernel_error=health.kernels and health.kernels.error.rstrip("."),
        folder=health.disk.folder.absolute(),
        disk_error=health.disk.error,
        torchrun=health.torchrun and health.torchrun.path,
        torchrun_python=health.torchrun and health.torchrun.python,
    )


def _list_output(health: Health, problem: HealthProblem) -> list[str]:
    """List the last lines of torchrun's output, where it explains more than our own sentence."""
    has_output = problem in (HealthProblem.TORCHRUN_SILENT, HealthProblem.ALL_REDUCE_FAILED)
    return health.torchrun.error.splitlines() if has_output and health.torchrun is not None else []


def _torch_as_json(torch: TorchHealth) -> dict[str, Any]:
    return {
        "version": torch.version,
        "support": torch.support.value,
        "off": [
            {"feature": limit.feature, "below": _write(limit.below), "reason": limit.reason} for limit in torch.limits
        ],
    }


def _write(release: Release) -> str:
    return ".".join(map(str, release))


_SUPPORTED = f"{_write(FIRST_SUPPORTED)} to {_write(LAST_TESTED)}"
_SENTENCES = {
    HealthProblem.TORCH_BROKEN: "torch cannot be imported: {torch_error}. Install PyTorch {supported} for {python}.",
    HealthProblem.TORCH_TOO_OLD: "torch {torch} is too old. Install PyTorch {supported}.",
    HealthProblem.KERNELS_BROKEN: (
        "the C kernels cannot be used: {kernel_error}. Unset TTRACE_KERNELS, or set it to torch to compute "
        "without them."
    ),
    HealthProblem.DISK_NOT_WRITABLE: "{folder} cannot be written: {disk_error}. Choose another folder with --out.",
    HealthProblem.TORCHRUN_MISSING: (
        "torchrun is not on PATH. Activate the environment in which PyTorch is installed, or write "
        "`python -m torch.distributed.run` in place of `torchrun` in your commands."
    ),
    HealthProblem.TORCHRUN_SILENT: (
        "{torchrun} started no rank. Install PyTorch again, or put another torchrun first on PATH. If it is only slow, "
        "use a longer --timeout."
    ),
    HealthProblem.TORCHRUN_FOREIGN: (
        "{torchrun} runs {torchrun_python}, which has no ttrace. Activate the environment of {python}, or install "
        "TTrace in the other one."
    ),
    HealthProblem.ALL_REDUCE_FAILED: (
        "torchrun started its ranks, but a gloo all-reduce between them failed. If the name of this host has no "
        "address, set GLOO_SOCKET_IFNAME=lo. If it is only slow, use a longer --timeout."
    ),
}
"""What is wrong, and what to do about it."""
