"""The public surface is pinned: changing it is a decision, not an accident."""

from __future__ import annotations

import inspect
from importlib import metadata

import ttrace
from ttrace import adapters


def test_the_public_names_are_these() -> None:
    assert sorted(ttrace.__all__) == [
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


def test_every_public_name_is_documented() -> None:
    for name in ttrace.__all__:
        assert inspect.getdoc(getattr(ttrace, name)), name


def test_an_adapter_needs_these_names_only() -> None:
    assert adapters.__all__ == sorted(name for names in adapters._MODULES.values() for name in names)
    for name in adapters.__all__:
        assert inspect.getdoc(getattr(adapters, name)), name


def test_the_version_is_that_of_the_package() -> None:
    assert ttrace.__version__ == metadata.version("torch-ttrace")


def test_attach_takes_these_arguments() -> None:
    assert list(inspect.signature(ttrace.attach).parameters) == [
        "model",
        "optimizer",
        "mesh",
        "rules",
        "mb_axis_size",
        "grad_factor",
        "adapter",
    ]


def test_a_session_offers_these_methods() -> None:
    assert [name for name in vars(ttrace.Session) if not name.startswith("_")] == ["step", "batch", "close"]
