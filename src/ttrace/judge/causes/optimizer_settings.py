"""Differences between the settings of the two sides' optimizers."""

from __future__ import annotations

from collections.abc import Iterable

from ttrace.trace.reader import Settings, Trace


def name_different_settings(reference: Trace, candidate: Trace, parameter: str) -> str:
    """In words, how a parameter's settings differ; empty if they do not, or a side has none for it."""
    ours, theirs = (trace.settings.get(parameter, ()) for trace in (reference, candidate))
    keys = dict.fromkeys(key for settings in ours for key in settings if any(key in other for other in theirs))
    pairs = ((key, _values(theirs, key), _values(ours, key)) for key in keys)
    return ", ".join(f"{key} {found} instead of {needed}" for key, found, needed in pairs if found != needed)


def _values(groups: Iterable[Settings], key: str) -> str:
    return " and ".join(sorted({settings[key] for settings in groups if key in settings}))
