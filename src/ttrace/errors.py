"""This module holds every exception TTrace raises on purpose.

A message names the tensor, what was found, what was needed, and the next move.
"""


class TTraceError(Exception):
    """Anything TTrace refuses to do, with the reason in words."""


class LayoutError(TTraceError):
    """A layout or rule that cannot be read, or that does not fit the tensor in front of it."""


class TraceError(TTraceError):
    """A trace that cannot be read or written."""


class NoTraceError(TraceError):
    """A folder in which no rank left a trace."""


class SketchError(TraceError):
    """The values of a tensor of which only a sketch was recorded."""


class CaptureError(TTraceError):
    """A run that cannot be traced as asked."""
