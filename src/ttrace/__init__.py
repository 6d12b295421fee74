"""TTrace finds silent bugs in distributed training by comparing it with a trusted reference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ttrace.attach import Session, attach
from ttrace.errors import CaptureError, DisagreementError, LayoutError, TraceError, TTraceError

if TYPE_CHECKING:
    from ttrace.large_references.pipelined import pipelined
    from ttrace.large_references.streamed import streamed
    from ttrace.layouts.holds import holds
    from ttrace.layouts.layout import Layout
    from ttrace.layouts.mesh import Mesh
    from ttrace.layouts.splits import split
    from ttrace.monitor.disagreement import Disagreement
    from ttrace.monitor.monitor import Monitor
    from ttrace.monitor.schedule import TraceSchedule
    from ttrace.monitor.watch import watch
    from ttrace.workflow.run import check

    __version__: str

__all__ = [
    "CaptureError",
    "Disagreement",
    "DisagreementError",
    "Layout",
    "LayoutError",
    "Mesh",
    "Monitor",
    "Session",
    "TTraceError",
    "TraceError",
    "TraceSchedule",
    "__version__",
    "attach",
    "check",
    "holds",
    "pipelined",
    "split",
    "streamed",
    "watch",
]

_MODULES = {
    "Disagreement": "ttrace.monitor.disagreement",
    "Layout": "ttrace.layouts.layout",
    "Mesh": "ttrace.layouts.mesh",
    "Monitor": "ttrace.monitor.monitor",
    "check": "ttrace.workflow.run",
    "holds": "ttrace.layouts.holds",
    "pipelined": "ttrace.large_references.pipelined",
    "split": "ttrace.layouts.splits",
    "streamed": "ttrace.large_references.streamed",
    "TraceSchedule": "ttrace.monitor.schedule",
    "watch": "ttrace.monitor.watch",
}
"""Public names whose modules import torch. They are imported on first use, so that `ttrace --help` needs no torch."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("torch-ttrace")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
