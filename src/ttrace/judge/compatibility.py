"""Checks that the traces of a check belong together: traces of different runs cannot be compared."""

from __future__ import annotations

from ttrace.errors import TraceError
from ttrace.trace.agreement import find_version_difference
from ttrace.trace.reader import Trace

_TTRACE = "ttrace"


def check_role(trace: Trace, role: str) -> None:
    """Refuse a trace that has a different role than the one needed."""
    if trace.manifest.role != role:
        raise TraceError(f"{trace.folder} has the role {trace.manifest.role}, but a {role} is needed here.")


def check_twin(twin: Trace, reference: Trace) -> None:
    """Refuse a twin that is not a run of the reference with nudged inputs."""
    _check_alike(twin, reference, ("seed", "mesh", "num_microbatches", "isolated"))
    check_measured(twin, reference)
    difference = find_version_difference(reference.manifest.versions, twin.manifest.versions)
    if difference:
        raise TraceError(
            f"{twin.folder} ran {difference[1]}, but {reference.folder} {difference[0]}. Trace both again."
        )


def check_measured(trace: Trace, other: Trace) -> None:
    """Refuse stats that were measured against a different trace."""
    if trace.manifest.measured not in (None, other.launch):
        raise TraceError(
            f"{trace.folder} was not measured against {other.folder}, but against a different trace. Trace both again: "
            "`ttrace run --fresh`."
        )


def check_candidate(candidate: Trace, reference: Trace) -> None:
    """Refuse a candidate with a different seed or from a different version of TTrace; other versions are only noted."""
    _check_alike(candidate, reference, ("seed", "isolated"))
    ours, theirs = (trace.manifest.versions.get(_TTRACE) for trace in (reference, candidate))
    if ours != theirs:
        raise TraceError(
            f"{candidate.folder} was traced by TTrace {theirs}, but {reference.folder} by {ours}. Trace both again."
        )


def _check_alike(trace: Trace, reference: Trace, names: tuple[str, ...]) -> None:
    for name in names:
        ours, theirs = getattr(reference.manifest, name), getattr(trace.manifest, name)
        if ours != theirs:
            raise TraceError(
                f"{trace.folder} has {name} {theirs!r}, but {reference.folder} has {name} {ours!r}: they are not from "
                "the same run. Trace both again."
            )
