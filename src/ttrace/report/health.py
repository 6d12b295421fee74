"""Health of an installation, as `ttrace doctor` measures it: facts without sentences.

Nothing here imports torch: that it cannot be imported may be what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrace.compat.torch import Limit

Release = tuple[int, int]
OLDEST, FIRST_SUPPORTED, LAST_TESTED = (2, 6), (2, 8), (2, 15)
"""Versions of torch: from the first one on parts work, from the second one to the third everything does."""
_UNJUDGED = 2


class TorchSupport(StrEnum):
    """Whether TTrace supports a version of torch."""

    TOO_OLD = "too old"
    PARTIAL = "partly supported"
    SUPPORTED = "supported"
    UNTESTED = "untested"
    """Newer than the last version that was tested."""

    @classmethod
    def of(cls, release: Release) -> TorchSupport:
        if release < OLDEST:
            return cls.TOO_OLD
        if release < FIRST_SUPPORTED:
            return cls.PARTIAL
        return cls.SUPPORTED if release <= LAST_TESTED else cls.UNTESTED


class HealthProblem(StrEnum):
    """What TTrace needs and this installation does not have."""

    TORCH_BROKEN = "torch cannot be imported"
    TORCH_TOO_OLD = "torch is too old"
    KERNELS_BROKEN = "kernels cannot be used"
    DISK_NOT_WRITABLE = "disk is not writable"
    TORCHRUN_MISSING = "torchrun is not on PATH"
    TORCHRUN_SILENT = "torchrun starts no rank"
    TORCHRUN_FOREIGN = "torchrun belongs to another Python"
    ALL_REDUCE_FAILED = "all-reduce failed"


@dataclass(frozen=True)
class TorchHealth:
    """The torch that runs."""

    version: str
    support: TorchSupport
    limits: tuple[Limit, ...]
    """What this version does not have."""


@dataclass(frozen=True)
class KernelHealth:
    """The C kernels that this process uses."""

    variant: str
    """The name of a variant, or `torch`."""
    runnable: tuple[str, ...]
    """The variants that this processor can run; none if the kernels were not compiled."""
    num_threads: int
    """How many threads a check uses."""
    error: str = ""
    """Why no variant could be chosen."""


@dataclass(frozen=True)
class AcceleratorHealth:
    """The accelerators that torch finds."""

    names: tuple[str, ...]
    warning: str = ""
    """What torch said when it looked for them."""


@dataclass(frozen=True)
class DiskHealth:
    """The disk of a folder."""

    folder: Path
    free_bytes: int | None = None
    bytes_per_second: float | None = None
    """How fast a file is written, until it is on the disk."""
    error: str = ""
    """Why the folder cannot be written."""


class TorchrunStage(StrEnum):
    """How far a launch by torchrun got."""

    MISSING = "not found"
    SILENT = "no rank started"
    FOREIGN = "ranks without ttrace"
    STARTED = "no all-reduce"
    WORKS = "works"


@dataclass(frozen=True)
class TorchrunHealth:
    """A launch of two ranks by torchrun."""

    path: str
    stage: TorchrunStage
    seconds: float = 0.0
    python: str = ""
    """The Python that ran the ranks."""
    error: str = ""
    """The end of its output, if it failed."""


@dataclass(frozen=True)
class Health:
    """Everything that was measured; what needs torch is None if torch cannot be imported."""

    platform: str
    versions: Mapping[str, str | None]
    """The versions of Python and of packages; None where a package is not installed."""
    torch: TorchHealth | None
    torch_error: str
    kernels: KernelHealth | None
    accelerators: AcceleratorHealth | None
    disk: DiskHealth
    torchrun: TorchrunHealth | None

    @property
    def problems(self) -> tuple[HealthProblem, ...]:
        """What TTrace needs and does not have here."""
        return tuple(self._list_problems())

    @property
    def exit(self) -> int:
        """The exit code of the command."""
        return _UNJUDGED if self.problems else 0

    def _list_problems(self) -> Iterator[HealthProblem]:
        if self.torch is None:
            yield HealthProblem.TORCH_BROKEN
        elif self.torch.support is TorchSupport.TOO_OLD:
            yield HealthProblem.TORCH_TOO_OLD
        if self.kernels is not None and self.kernels.error:
            yield HealthProblem.KERNELS_BROKEN
        if self.disk.error:
            yield HealthProblem.DISK_NOT_WRITABLE
        if self.torchrun is not None and self.torchrun.stage in _TORCHRUN_PROBLEMS:
            yield _TORCHRUN_PROBLEMS[self.torchrun.stage]


_TORCHRUN_PROBLEMS = {
    TorchrunStage.MISSING: HealthProblem.TORCHRUN_MISSING,
    TorchrunStage.SILENT: HealthProblem.TORCHRUN_SILENT,
    TorchrunStage.FOREIGN: HealthProblem.TORCHRUN_FOREIGN,
    TorchrunStage.STARTED: HealthProblem.ALL_REDUCE_FAILED,
}
