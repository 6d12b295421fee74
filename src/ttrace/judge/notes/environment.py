"""This module says in what the two sides were run differently, where that may explain what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ttrace.trace.reader import Trace

_MOST = 5


def note_environment(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Other versions of what both sides loaded, and other variables."""
    ours, theirs = reference.manifest, candidate.manifest
    both = ours.versions.keys() & theirs.versions.keys()
    versions = [_told(name, ours.versions, theirs.versions) for name in sorted(both)]
    variables = [
        _told(name, ours.environment, theirs.environment) for name in sorted(ours.environment | theirs.environment)
    ]
    for what, told in (("versions", versions), ("variables", variables)):
        different = [text for text in told if text]
        if different:
            more = f", and {len(different) - _MOST} more" if len(different) > _MOST else ""
            yield f"the two sides were run with other {what}: {', '.join(different[:_MOST])}{more}"


def _told(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    a, b = ours.get(name, "unset"), theirs.get(name, "unset")
    return "" if a == b else f"{name} {a} in the reference, {b} in the candidate"
