"""A candidate's step as a trace that Perfetto and chrome://tracing open: modules, collectives and errors over time.

Each rank is a process: its modules are nested slices, its collectives are slices of a second track, with arrows between
the ranks of each, and the errors of its tensors are counters. The format is Chrome's JSON of trace events.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Comparison, Judgement
from ttrace.layouts.ids import Kind, TensorId, is_inside
from ttrace.layouts.mesh import Mesh
from ttrace.report.facts import keep_finite, shorten_place
from ttrace.trace.collectives import Collective
from ttrace.trace.rank import RankTrace
from ttrace.trace.reader import Trace
from ttrace.untrusted import write_named

Event = dict[str, Any]
_MODULES, _COLLECTIVES = 1, 2
"""The tracks of a rank."""
_PASSES = {
    Kind.INPUT: "forward",
    Kind.OUTPUT: "forward",
    Kind.GRAD_OUTPUT: "backward",
    Kind.GRAD_INPUT: "backward",
    Kind.RECOMPUTE_INPUT: "recompute",
    Kind.RECOMPUTE_OUTPUT: "recompute",
}
_COUNTED = (Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.PARAM_GRAD)
_WRONG = "terrible"
"""chrome://tracing's name of red; Perfetto chooses colours by names, so the name contains it too."""
_MOST = 1e6
"""Larger errors than this many tolerances are drawn as this: one outlier would flatten the rest."""


@dataclass(frozen=True)
class _Slice:
    """A module's part of a pass, in microseconds."""

    name: str
    of: str
    """The pass."""
    step: int
    microbatch: int
    begin: int
    end: int
    is_wrong: bool


def write_perfetto(path: Path, judgement: Judgement, candidate: Trace) -> None:
    """Write the trace into a file, compressed if its name asks for it."""
    text = json.dumps(
        {"traceEvents": list(list_events(judgement, candidate)), "displayTimeUnit": "ms"}, allow_nan=False
    )
    try:
        write_named(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}. Choose another place.") from None


def list_events(judgement: Judgement, candidate: Trace) -> Iterator[Event]:
    """List all events; times are in microseconds since the first of them."""
    known = {comparison.id: comparison for comparison in judgement.comparisons}
    accused = {finding.module for finding in judgement.findings}
    times = [record.time for rank in candidate.ranks for record in rank.records]
    times += [one.begin for rank in candidate.ranks for one in rank.collectives]
    zero = min(times, default=0)
    for rank in candidate.ranks:
        number = rank.manifest.rank
        yield _name("process_name", number, 0, str(candidate.mesh.coord(number)))
        yield _name("thread_name", number, _MODULES, "modules")
        yield _name("thread_name", number, _COLLECTIVES, "collectives")
        for part in _nest(_list_slices(rank, known, accused)):
            yield _draw_slice(part, number, zero)
        yield from _draw_collectives(rank, zero)
        yield from _draw_counters(rank, known, zero)
    yield from _draw_arrows({rank.manifest.rank: rank.collectives for rank in candidate.ranks}, candidate.mesh, zero)


def _name(what: str, rank: int, track: int, text: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": text}}


def _list_slices(rank: RankTrace, known: Mapping[TensorId, Comparison], accused: Iterable[str]) -> list[_Slice]:
    """List each call of each module, from the first to the last of its tensors in a pass."""
    found: dict[tuple[str, str, int, int, int], _Slice] = {}
    wrong_modules = set(accused)
    for record in rank.records:
        tensor_id, of = record.id, _PASSES.get(record.id.kind)
        if of is None:
            continue
        comparison = known.get(tensor_id)
        is_wrong = tensor_id.name in wrong_modules and comparison is not None and comparison.verdict.is_wrong
        key = (tensor_id.name, of, tensor_id.step, record.microbatch, tensor_id.call)
        begin = _Slice(tensor_id.name, of, tensor_id.step, record.microbatch, record.time, record.time, is_wrong)
        old = found.setdefault(key, begin)
        found[key] = replace(
            old, begin=min(old.begin, record.time), end=max(old.end, record.time), is_wrong=old.is_wrong or is_wrong
        )
    return list(found.values())


def _nest(slices: list[_Slice]) -> Iterator[_Slice]:
    """Put every slice inside the slice of the module around it, and after the slices before it.

    Hooks see the tensors of a module and of its parts in an order of their own, and branches may run in turns. A slice
    that does not fit is left out.
    """
    around: list[_Slice] = []
    free_from = [0]
    """By depth, when the next slice may begin."""
    # The outer module first, where both begin at once.
    for part in sorted(slices, key=lambda part: (part.begin, -part.end, part.name.count("."))):
        while around and not _is_around(around[-1], part):
            around.pop()
            free_from.pop()
        begin = max(part.begin, free_from[-1])
        end = max(part.end, begin + 1)
        if around:
            end = min(end, around[-1].end)
        if end > begin:
            free_from[-1] = end
            nested = replace(part, begin=begin, end=end)
            around.append(nested)
            free_from.append(begin)
            yield nested


def _is_around(outer: _Slice, inner: _Slice) -> bool:
    is_same_pass = (outer.of, outer.step, outer.microbatch) == (inner.of, inner.step, inner.microbatch)
    return outer.end > inner.begin and is_same_pass and is_inside(inner.name, outer.name)


def _draw_slice(part: _Slice, rank: int, zero: int) -> Event:
    event: Event = {
        "ph": "X",
        "name": f"✗ {part.name}" if part.is_wrong else part.name,
        "cat": part.of,
        "pid": rank,
        "tid": _MODULES,
        "ts": part.begin - zero,
        "dur": part.end - part.begin,
        "args": {"pass": part.of, "step": part.step, "microbatch": part.microbatch},
    }
    return {**event, "cname": _WRONG} if part.is_wrong else event


def _draw_collectives(rank: RankTrace, zero: int) -> Iterator[Event]:
    """Draw each collective until the next thing that its rank did: when it ended is not recorded."""
    moments = sorted({*(record.time for record in rank.records), *(one.begin for one in rank.collectives)})
    following = dict(itertools.pairwise(moments))
    for one in rank.collectives:
        yield {
            "ph": "X",
            "name": str(one),
            "cat": one.op,
            "pid": rank.manifest.rank,
            "tid": _COLLECTIVES,
            "ts": one.begin - zero,
            "dur": max(following.get(one.begin, one.begin + 1) - one.begin, 1),
            "args": {
                "module": one.module,
                "pass": one.phase.value,
                "shape": list(one.shape),
                "dtype": one.dtype,
                "bytes": one.num_bytes,
                "at": shorten_place(one.source),
                "issued by": one.issuer or "the script",
            },
        }


def _draw_counters(rank: RankTrace, known: Mapping[TensorId, Comparison], zero: int) -> Iterator[Event]:
    """Draw errors in units of their tolerances: 1 is the most that rounding explains."""
    for record in rank.records:
        comparison = known.get(record.id)
        if record.id.kind not in _COUNTED or comparison is None or comparison.tolerance is None:
            continue
        value = keep_finite(min(comparison.excess, _MOST))
        if value is not None and not math.isnan(value):
            name = f"error of {record.id.kind.value}"
            yield {
                "ph": "C",
                "name": name,
                "pid": rank.manifest.rank,
                "ts": record.time - zero,
                "args": {"tolerances": value},
            }


def _draw_arrows(ledgers: Mapping[int, Sequence[Collective]], mesh: Mesh, zero: int) -> Iterator[Event]:
    """Draw an arrow from the first rank that issued a collective to each other one, and along each message."""
    counts: dict[tuple[object, ...], int] = {}
    issued: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank, entries in ledgers.items():
        for one in entries:
            if one.is_message:
                pair = (rank, one.peer) if one.op == "send" else (one.peer, rank)
                what: tuple[object, ...] = ("message", *pair)
            else:
                what = ("collective", one.group.list_ranks(mesh, rank))
            number = counts.get((rank, one.op, what), 0) if one.is_message else counts.get((rank, what), 0)
            counts[(rank, one.op, what) if one.is_message else (rank, what)] = number + 1
            issued.setdefault((what, number), []).append((one.begin - zero, rank))
    for arrow, places in enumerate(issued.values()):
        (begin, first), *others = sorted(places)
        for other, (at, rank) in enumerate(others):
            # Each arrow has its own number: an arrow with several ends would be drawn from end to end.
            common = {"cat": "communication", "name": "communication", "id": arrow * len(ledgers) + other}
            yield {"ph": "s", "pid": first, "tid": _COLLECTIVES, "ts": begin, **common}
            yield {"ph": "f", "bp": "e", "pid": rank, "tid": _COLLECTIVES, "ts": at, **common}
