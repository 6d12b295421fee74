"""Environments: versions, variables and flags of torch that differ between the two sides, and may explain a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ttrace.trace.reader import Trace

_MOST = 5


def note_environment(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Note the versions, the variables and the flags of torch that differ between the two sides."""
    ours, theirs = reference.manifest, candidate.manifest
    both = ours.versions.keys() & theirs.versions.keys()
    versions = [_describe(name, ours.versions, theirs.versions) for name in sorted(both)]
    variables = [
        _describe(name, ours.environment, theirs.environment) for name in sorted(ours.environment | theirs.environment)
    ]
    flags = [_describe(name, reference.flags, candidate.flags) for name in sorted(reference.flags | candidate.flags)]
    for what, texts in (("versions", versions), ("variables", variables), ("settings of torch", flags)):
        different = [text for text in texts if text]
        if different:
            more = f", and {len(different) - _MOST} more" if len(different) > _MOST else ""
            yield f"the two sides ran with different {what}: {', '.join(different[:_MOST])}{more}"


def _describe(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    a, b = ours.get(name, "unset"), theirs.get(name, "unset")
    return "" if a == b else f"{name} {a} in the reference, {b} in the candidate"
