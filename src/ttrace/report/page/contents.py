"""What the HTML report shows, as plain data: from a judgement and the traces that it was made from."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ttrace.errors import TraceError
from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.causes.reductions import find_conflict_axes
from ttrace.judge.findings.error_map import RankMap, map_error
from ttrace.judge.reason import describe
from ttrace.judge.verdict import Comparison, Exit, Finding, Judgement, Verdict
from ttrace.layouts.ids import ROOT, Kind
from ttrace.report.collectives import list_collectives
from ttrace.report.facts import (
    BUT_PROBLEMS,
    PASSED,
    SYMBOLS,
    WEAKNESSES,
    describe_provenance,
    group_alike,
    has_only_problems,
    keep_finite,
    list_facts,
    list_reach,
    make_headline,
)
from ttrace.report.page import document
from ttrace.report.terminal.depth import Depth
from ttrace.trace.format import DTYPES, END
from ttrace.trace.reader import Trace
from ttrace.trace.seal import read_document
from ttrace.untrusted import clean_text

MOST_MAPS = 8
_MOST_TRIED = 64
"""How many wrong tensors are tried: some, for instance sketches, have no map."""
MOST_CONFLICTS = 24
"""How many of the replicas that differ are read again, to find along which axes they do."""
_MOST_LISTED = 200
_EPSILONS = {
    torch.finfo(dtype).eps: str(dtype).removeprefix("torch.") for dtype in DTYPES.values() if dtype.is_floating_point
}


ROLES = ("reference", "candidate")
_COMMIT_LENGTH = 12


@dataclass(frozen=True)
class Side:
    """How one trace was made; a field that is not known is empty."""

    command: str = ""
    date: str = ""
    """In UTC, to the minute."""
    commit: str = ""
    """Shortened, and whether files differed from it."""


def read_sides(folder: Path) -> dict[str, Side]:
    """Read how the reference and the candidate of a run were made.

    Each trace has a mark of its own beside it, since a reference may be older than the candidate. Only marks of older
    versions lack the date and the commit; then the commit of the whole run is the next best.
    """
    run = read_document(folder / "run.json")
    return {role: _read(folder / role, run, role) for role in ROLES}


def _read(trace: Path, run: dict[str, Any], role: str) -> Side:
    place = trace.resolve()  # cells of a sweep link to references that they share
    try:
        mark = read_document(place.parent / f"{place.name}.done.json")
    except TraceError:
        mark = {}  # a damaged mark counts as none
    command = mark.get("command")
    return Side(
        clean_text(shlex.join(map(str, command))) if isinstance(command, list) else _text(run, role),
        _format_date(_text(mark, "time")),
        _format_commit(_text(mark, "git") or _text(run, "git")),
    )


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    return clean_text(value) if isinstance(value, str) else ""


def _format_date(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return ""


def _format_commit(state: str) -> str:
    changed = ", with uncommitted changes" if state.endswith("+") else ""
    return f"{state.removesuffix('+')[:_COMMIT_LENGTH]}{changed}"


@dataclass(frozen=True)
class About:
    """What the page shows of a run besides its judgement: the commands, times, commits and traces of both sides."""

    title: str
    next_command: str
    sides: Mapping[str, Side] = field(default_factory=dict)
    """By role."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    traces: tuple[Trace, Trace] | None = None
    """Reference and candidate; without them the page has no maps, and nothing about axes and parameters."""

    @classmethod
    def of(cls, folder: Path, next_command: str, seen: Path | None = None) -> About:
        """Read a run's folder; `seen` is the folder with the most complete traces, if that is another one."""
        traces = Trace((seen or folder) / "reference"), Trace((seen or folder) / "candidate")
        return cls(str(folder), next_command, read_sides(folder), measure_stages(folder), traces)


def build_page(judgement: Judgement, about: About) -> dict[str, Any]:
    """Build everything on the page, ready for JSON. Texts are not escaped: that is up to whatever shows them."""
    comparisons = judgement.comparisons
    groups = group_alike(judgement.findings)
    depth = Depth.of(comparisons)
    return {
        "title": about.title,
        "root": _name_root(about.traces),
        "head": _build_head(judgement, about),
        "reach": [list(fact) for fact in list_reach(judgement)],
        "next": about.next_command,
        "count": len(comparisons),
        "counts": {verdict.value: judgement.count(verdict) for verdict in Verdict},
        "precision": _find_precision(comparisons),
        "findings": [_build_finding(group, first=i == 0) for i, group in enumerate(groups[:_MOST_LISTED])],
        "problems": list(judgement.problems)[:_MOST_LISTED],
        "notes": list(judgement.notes)[:_MOST_LISTED],
        "places": list(depth.names),
        "tensors": _pack_tensors(comparisons, depth),
        "maps": _build_maps(judgement, about.traces) if about.traces else [],
        "conflicts": _count_conflicts(comparisons, about.traces) if about.traces else [],
        "collectives": _list_collectives(about.traces),
        "coverage": _count_coverage(comparisons),
        "power": _measure_power(judgement),
        "run": _describe_run(about),
    }


def _list_collectives(traces: tuple[Trace, Trace] | None) -> dict[str, Any]:
    """List what the candidate's ranks communicated, without the less useful columns."""
    rows = list_collectives(traces[1]) if traces else []
    columns_shown = ("module", "phase", "operation", "over", "shape", "dtype", "times", "ranks", "at")
    shown = [
        ["x".join(map(str, row[name])) if name == "shape" else row[name] for name in columns_shown] for row in rows
    ]
    return {"columns": columns_shown, "rows": shown[:_MOST_LISTED], "count": len(rows)}


def _name_root(traces: tuple[Trace, Trace] | None) -> str:
    """Name the whole model by its class: in ids it is only a dot."""
    root = traces[0].manifest.modules.get(ROOT) if traces else None
    return root.type.rpartition(".")[2] if root else "model"


def _build_head(judgement: Judgement, about: About) -> dict[str, Any]:
    exit_code = judgement.exit
    head: dict[str, Any] = {"exit": int(exit_code), "symbol": SYMBOLS[exit_code], "mesh": "", "ranks": 0}
    if about.traces is not None:
        manifest = about.traces[1].manifest
        head |= {"mesh": manifest.mesh, "ranks": manifest.num_ranks}
    if exit_code is Exit.FOUND:
        what, rest = make_headline(judgement.findings[0], first=True)
        return head | {"what": what, "rest": rest}
    if exit_code is Exit.PASSED:
        return head | {"what": "", "rest": PASSED}
    if has_only_problems(judgement):
        return head | {"what": "", "rest": BUT_PROBLEMS}
    spoilt = sum(comparison.spoils for comparison in judgement.comparisons)
    words = f"{spoilt} tensors could not be judged" if spoilt else "not everything could be judged"
    return head | {"what": "", "rest": words}


def _build_finding(group: Sequence[Finding], *, first: bool) -> dict[str, Any]:
    what, rest = make_headline(group[0], first=first)
    return {
        "id": str(group[0].comparison.id),
        "what": what,
        "rest": rest,
        "facts": [list(fact) for fact in list_facts(group[0], group[1:])],
        "ids": [str(finding.comparison.id) for finding in group[:_MOST_LISTED]],
    }


def _find_precision(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Find the machine epsilon of most outputs, or else of most tensors."""
    floors = [c.tolerance.floor for c in comparisons if c.tolerance and c.tolerance.floor and c.id.kind is Kind.OUTPUT]
    floors = floors or [c.tolerance.floor for c in comparisons if c.tolerance and c.tolerance.floor]
    epsilon = 2 * statistics.median_low(floors) if floors else torch.finfo(torch.float32).eps
    return {"epsilon": epsilon, "name": _EPSILONS.get(epsilon, "")}


def _pack_tensors(comparisons: Sequence[Comparison], depth: Depth) -> dict[str, Any]:
    ids = [comparison.id for comparison in comparisons]
    tolerances = [comparison.tolerance for comparison in comparisons]
    return {
        "count": len(comparisons),
        "place": document.pack_integers(depth.places),
        "step": document.pack_integers(i.step for i in ids),
        "microbatch": document.pack_integers(-1 if i.microbatch is None else i.microbatch for i in ids),
        "call": document.pack_integers(i.call for i in ids),
        "name": document.pack_words(i.name for i in ids),
        "kind": document.pack_words(i.kind.value for i in ids),
        "slot": document.pack_words(i.site.slot for i in ids),
        "verdict": document.pack_words(c.verdict.value for c in comparisons),
        "spoils": document.pack_integers(int(c.spoils) for c in comparisons),
        "reason": document.pack_words(describe(c.why) for c in comparisons),
        "layout": document.pack_words(c.layout for c in comparisons),
        "by": document.pack_words(describe_provenance(c.by) for c in comparisons),
        # A tensor that was not measured has no error, but its Stats would give 0.
        "error": document.pack_floats(c.error if c.tolerance else math.nan for c in comparisons),
        "replicas": document.pack_floats(c.replica_error if c.tolerance else math.nan for c in comparisons),
        "scale": document.pack_floats(c.stats.scale - 1.0 for c in comparisons),
        "tolerance": document.pack_floats(t.value if t else math.nan for t in tolerances),
        "twins": document.pack_floats(t.twin_error if t else math.nan for t in tolerances),
        "scale_tolerance": document.pack_floats(t.scale if t else math.nan for t in tolerances),
    }


def _build_maps(judgement: Judgement, traces: tuple[Trace, Trace]) -> list[dict[str, Any]]:
    """Map the errors of the findings' tensors, then of the first other wrong ones."""
    wrong = [finding.comparison for finding in judgement.findings]
    wrong += [comparison for comparison in judgement.comparisons if comparison.verdict.is_wrong]
    tried = list({c.id: c for c in wrong}.values())[:_MOST_TRIED]
    reference, candidate = _only_of(tried, traces)
    maps = []
    for comparison in tried:
        error_map = map_error(comparison, reference, candidate)
        if error_map is not None:
            ranks = [_build_rank_map(rank) for rank in error_map.ranks]
            maps.append({"id": str(comparison.id), "shape": error_map.shape, "of": error_map.num_ranks, "ranks": ranks})
        if len(maps) == MOST_MAPS:
            break
    return maps


def _only_of(comparisons: Iterable[Comparison], traces: tuple[Trace, Trace]) -> tuple[Trace, Trace]:
    """Leave out of the traces what is of other modules and parameters: reading all of a large one takes a while."""
    names = {comparison.id.name for comparison in comparisons}
    return traces[0].only(names), traces[1].only(names)


def _build_rank_map(rank: RankMap) -> dict[str, Any]:
    blocks = [value for row in rank.blocks for value in row]
    return {
        "where": rank.where,
        "region": rank.region,
        "rows": len(rank.blocks),
        "blocks": document.pack_floats(blocks),
    }


def _count_conflicts(comparisons: Sequence[Comparison], traces: tuple[Trace, Trace]) -> list[dict[str, Any]]:
    """Count by axis the tensors whose replicas differ, with the first and the worst of them."""
    by_axis: dict[str, list[Comparison]] = {}
    conflicts = [c for c in comparisons if c.verdict is Verdict.CONFLICT]
    traces = _only_of(conflicts[:MOST_CONFLICTS], traces)
    for comparison in conflicts[:MOST_CONFLICTS]:
        for axis in _find_axes(comparison, traces):
            by_axis.setdefault(axis, []).append(comparison)
    return [
        {
            "axis": axis,
            "count": len(mine),
            "worst": keep_finite(max(c.replica_error for c in mine)),
            "first": str(mine[0].id),
            "looked_at": min(len(conflicts), MOST_CONFLICTS),
            "of": len(conflicts),
        }
        for axis, mine in by_axis.items()
    ]


def _find_axes(comparison: Comparison, traces: tuple[Trace, Trace]) -> list[str]:
    evidence = Evidence.of(comparison, *traces)
    return (find_conflict_axes(evidence) if evidence else []) or ["no single axis"]


def _count_coverage(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Count what was compared by kind, what was not and why, and where layouts come from."""
    kinds: dict[Kind, Counter[Verdict]] = {kind: Counter() for kind in Kind}
    for comparison in comparisons:
        kinds[comparison.id.kind][comparison.verdict] += 1
    reasons: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.verdict is not Verdict.PASS and not comparison.verdict.is_wrong:
            reasons.setdefault(describe(comparison.why), []).append(comparison)
    return {
        "kinds": [[kind.value, *(counts[v] for v in Verdict)] for kind, counts in kinds.items() if counts],
        "verdicts": [verdict.value for verdict in Verdict],
        "reasons": [
            {"reason": reason, "count": len(mine), "first": str(mine[0].id), "spoils": any(c.spoils for c in mine)}
            for reason, mine in sorted(reasons.items(), key=lambda item: -len(item[1]))
        ][:_MOST_LISTED],
        "layouts": _count_sources(comparisons),
    }


def _count_sources(comparisons: Iterable[Comparison]) -> list[list[Any]]:
    sources = Counter("inferred" if c.has_inferred_layout else "stated" if c.by else "nobody" for c in comparisons)
    return [list(item) for item in sources.most_common()]


def _measure_power(judgement: Judgement) -> dict[str, Any]:
    """Measure the smallest error that would have been reported, from tolerances alone; `ttrace selftest` tests it."""
    errors: dict[Kind, list[float]] = {}
    for comparison in judgement.comparisons:
        if (error := comparison.detectable_error) is not None:
            errors.setdefault(comparison.id.kind, []).append(error)
    rows = [
        [kind.value, len(mine), keep_finite(statistics.median(mine)), keep_finite(max(mine))]
        for kind in Kind
        if (mine := errors.get(kind))
    ]
    weak = judgement.reach.weak if judgement.reach else {}
    blind = [[name, WEAKNESSES[weakness]] for name, weakness in weak.items()]
    return {"kinds": rows, "blind": blind[:_MOST_LISTED], "num_blind": len(blind)}


def _describe_run(about: About) -> dict[str, Any]:
    versions = [trace.manifest.versions for trace in about.traces] if about.traces else [{}, {}]
    sides = {role: about.sides.get(role, Side()) for role in ROLES}
    return {
        "date": sides["candidate"].date,
        "sides": [{"role": role, **asdict(side)} for role, side in sides.items()],
        "seconds": [[name, round(seconds, 2)] for name, seconds in about.seconds.items()],
        "versions": [
            [name, versions[0].get(name, ""), versions[1].get(name, "")] for name in {**versions[0], **versions[1]}
        ],
    }


_PLAN = ".plan.json"


def measure_stages(folder: Path) -> dict[str, float]:
    """Measure the seconds of each stage that ended, in the order in which they ran, from the times of files.

    A plan is written when its command starts, and a rank's end when its last traced step is over.
    """
    durations: dict[str, tuple[float, float]] = {}
    for place in (folder, folder / "isolated"):
        for plan in place.glob(f"*{_PLAN}"):
            trace = place / plan.name.removesuffix(_PLAN)
            try:
                start = plan.stat().st_mtime
                end = max((path.stat().st_mtime for path in trace.glob(f"rank-*/{END}")), default=0.0)
            except OSError:  # such as a circle of links: an unknown duration must not stop the report
                continue
            if end > start:
                name = trace.name if place == folder else f"{place.name} {trace.name}"
                durations[name] = start, end - start
    return {name: seconds for name, (_, seconds) in sorted(durations.items(), key=lambda item: item[1])}
