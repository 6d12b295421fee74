"""TTrace finds silent bugs in distributed training by comparing it with a trusted reference."""

from ttrace.attach import Tracing, attach
from ttrace.errors import CaptureError, LayoutError, TraceError, TTraceError
from ttrace.layouts.layout import Layout
from ttrace.layouts.splits import split
from ttrace.reference.streamed import streamed
from ttrace.tensors.holds import holds
from ttrace.tensors.mesh import Mesh

__all__ = [
    "CaptureError",
    "Layout",
    "LayoutError",
    "Mesh",
    "TTraceError",
    "TraceError",
    "Tracing",
    "attach",
    "holds",
    "split",
    "streamed",
]
