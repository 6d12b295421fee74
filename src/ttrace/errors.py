"""This module holds every exception TTrace raises on purpose.

A message names the tensor, what was found, what was needed, and the next move.
"""


class TTraceError(Exception):
    """Anything TTrace refuses to do, with the reason in words; the base class of all others."""


class LayoutError(TTraceError):
    """A layout, split, rule or mesh that cannot be read, or that does not fit the tensor."""


class TraceError(TTraceError):
    """A trace that cannot be read or written."""


class NoTraceError(TraceError):
    """A folder in which no rank left a trace."""


class SketchError(TraceError):
    """The values of a tensor of which only a sketch was recorded."""


class CaptureError(TTraceError):
    """A script that cannot be traced as it is."""


class DisagreementError(TTraceError):
    """Ranks of a watched run that hold different values where all must be equal."""
