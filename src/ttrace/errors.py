"""Every exception that TTrace raises on purpose.

A message names the tensor, what was found, what was needed, and what to do next.
"""


class TTraceError(Exception):
    """Base class of all errors that TTrace raises on purpose; the message gives the reason."""


class LayoutError(TTraceError):
    """A layout, split, rule or mesh cannot be parsed, or does not fit the tensor."""


class TraceError(TTraceError):
    """A trace cannot be read or written."""


class NoTraceError(TraceError):
    """A folder does not contain a trace of any rank."""


class SketchError(TraceError):
    """The values of a tensor were requested, but only a sketch of it was recorded."""


class CaptureError(TTraceError):
    """A script cannot be traced as it is."""


class DisagreementError(TTraceError):
    """Ranks of a watched run have different values where all must be equal."""
