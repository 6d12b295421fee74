"""The public surface is pinned: changing it is a decision, not an accident."""

from __future__ import annotations

import inspect
from importlib import metadata

import ttrace


def test_the_public_names_are_these() -> None:
    assert sorted(ttrace.__all__) == [
        "CaptureError",
        "DisagreementError",
        "Layout",
        "LayoutError",
        "Mesh",
        "Session",
        "TTraceError",
        "TraceError",
        "TraceSchedule",
        "__version__",
        "attach",
        "holds",
        "pipelined",
        "split",
        "streamed",
        "watch",
    ]


def test_every_public_name_is_documented() -> None:
    for name in ttrace.__all__:
        assert inspect.getdoc(getattr(ttrace, name)), name


def test_the_version_is_that_of_the_package() -> None:
    assert ttrace.__version__ == metadata.version("torch-ttrace")


def test_attach_takes_these_arguments() -> None:
    assert list(inspect.signature(ttrace.attach).parameters) == [
        "model",
        "optimizer",
        "mesh",
        "rules",
        "num_microbatches",
        "grad_factor",
        "adapter",
    ]


def test_a_session_offers_these_methods() -> None:
    assert [name for name in vars(ttrace.Session) if not name.startswith("_")] == ["step", "batch", "close"]
