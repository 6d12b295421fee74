"""What the HTML report shows, as plain data: from a judgement and the traces that it was made from."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ttrace.errors import SketchError
from ttrace.judge.causes.error_map import RankMap, error_map
from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.causes.reductions import axes_of_conflict
from ttrace.judge.notes.blind_spots import without_power
from ttrace.judge.selftest import Power
from ttrace.judge.sentences import describe
from ttrace.judge.verdict import Comparison, Exit, Finding, Judgement, Verdict
from ttrace.report.facts import BUT_PROBLEMS, PASSED, SYMBOLS, group_alike, has_only_problems, list_facts, make_headline
from ttrace.report.layout_source import describe_provenance
from ttrace.report.page import columns
from ttrace.report.page.depth import Depth
from ttrace.report.page.sides import ROLES, Side, read_sides
from ttrace.report.page.timing import measure_stages
from ttrace.tensors.ids import ROOT, Kind
from ttrace.trace.format import DTYPES
from ttrace.trace.reader import Trace

MOST_MAPS = 8
MOST_CONFLICTS = 24
"""So many replicas that differ are read again, to say along which axes."""
_MOST_LISTED = 200
_EPSILONS = {
    torch.finfo(dtype).eps: str(dtype).removeprefix("torch.") for dtype in DTYPES.values() if dtype.is_floating_point
}


@dataclass(frozen=True)
class About:
    """What a judgement does not know of itself."""

    title: str
    next_command: str
    sides: Mapping[str, Side] = field(default_factory=dict)
    """By role."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    traces: tuple[Trace, Trace] | None = None
    """Reference and candidate; without them there are no maps, and nothing is said of axes and parameters."""

    @classmethod
    def of(cls, folder: Path, next_command: str, seen: Path | None = None) -> About:
        """What a run's folder tells; `seen` is the one in which tensors are known best, if it is another."""
        traces = Trace((seen or folder) / "reference"), Trace((seen or folder) / "candidate")
        return cls(str(folder), next_command, read_sides(folder), measure_stages(folder), traces)


def build_page(judgement: Judgement, about: About) -> dict[str, Any]:
    """Everything on the page, as JSON can hold it. Texts are as the traces have them: whoever shows them escapes."""
    comparisons = judgement.comparisons
    groups = group_alike(judgement.findings)
    depth = Depth.of(comparisons)
    return {
        "title": about.title,
        "root": _name_root(about.traces),
        "head": _head(judgement, about),
        "next": about.next_command,
        "count": len(comparisons),
        "counts": {verdict.value: judgement.count(verdict) for verdict in Verdict},
        "precision": _precision(comparisons),
        "findings": [_finding(group, first=i == 0) for i, group in enumerate(groups[:_MOST_LISTED])],
        "problems": list(judgement.problems)[:_MOST_LISTED],
        "notes": list(judgement.notes)[:_MOST_LISTED],
        "places": list(depth.names),
        "tensors": _tensors(comparisons, depth),
        "maps": _maps(judgement, about.traces) if about.traces else [],
        "conflicts": _conflicts(comparisons, about.traces) if about.traces else [],
        "coverage": _coverage(comparisons),
        "power": _power(comparisons, about.traces),
        "run": _run(about),
    }


def _name_root(traces: tuple[Trace, Trace] | None) -> str:
    """The class of the whole model: its own name is a dot."""
    root = traces[0].manifest.modules.get(ROOT) if traces else None
    return root.type.rpartition(".")[2] if root else "model"


def _head(judgement: Judgement, about: About) -> dict[str, Any]:
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


def _finding(group: Sequence[Finding], *, first: bool) -> dict[str, Any]:
    what, rest = make_headline(group[0], first=first)
    return {
        "id": str(group[0].comparison.id),
        "what": what,
        "rest": rest,
        "facts": [list(fact) for fact in list_facts(group[0], group[1:])],
        "ids": [str(finding.comparison.id) for finding in group[:_MOST_LISTED]],
    }


def _precision(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Machine epsilon of the working precision: that of most activations, or of anything."""
    floors = [c.tolerance.floor for c in comparisons if c.tolerance and c.tolerance.floor and c.id.kind is Kind.OUTPUT]
    floors = floors or [c.tolerance.floor for c in comparisons if c.tolerance and c.tolerance.floor]
    epsilon = 2 * statistics.median_low(floors) if floors else torch.finfo(torch.float32).eps
    return {"epsilon": epsilon, "name": _EPSILONS.get(epsilon, "")}


def _tensors(comparisons: Sequence[Comparison], depth: Depth) -> dict[str, Any]:
    ids = [comparison.id for comparison in comparisons]
    tolerances = [comparison.tolerance for comparison in comparisons]
    return {
        "count": len(comparisons),
        "place": columns.pack_integers(depth.places),
        "step": columns.pack_integers(i.step for i in ids),
        "microbatch": columns.pack_integers(-1 if i.microbatch is None else i.microbatch for i in ids),
        "call": columns.pack_integers(i.call for i in ids),
        "name": columns.pack_words(i.name for i in ids),
        "kind": columns.pack_words(i.kind.value for i in ids),
        "slot": columns.pack_words(i.site.slot for i in ids),
        "verdict": columns.pack_words(c.verdict.value for c in comparisons),
        "spoils": columns.pack_integers(int(c.spoils) for c in comparisons),
        "reason": columns.pack_words(describe(c.why) for c in comparisons),
        "layout": columns.pack_words(c.layout for c in comparisons),
        "by": columns.pack_words(describe_provenance(c.by) for c in comparisons),
        # What was not measured has no error; Stats would say 0.
        "error": columns.pack_floats(c.error if c.tolerance else math.nan for c in comparisons),
        "replicas": columns.pack_floats(c.replica_error if c.tolerance else math.nan for c in comparisons),
        "scale": columns.pack_floats(c.stats.scale - 1.0 for c in comparisons),
        "tolerance": columns.pack_floats(t.value if t else math.nan for t in tolerances),
        "twins": columns.pack_floats(t.twin_error if t else math.nan for t in tolerances),
        "scale_tolerance": columns.pack_floats(t.scale if t else math.nan for t in tolerances),
    }


def _maps(judgement: Judgement, traces: tuple[Trace, Trace]) -> list[dict[str, Any]]:
    """Where the error of the tensors that were found lies, then of the first wrong ones."""
    wrong = [finding.comparison for finding in judgement.findings]
    wrong += [comparison for comparison in judgement.comparisons if comparison.verdict.is_wrong]
    found = []
    for comparison in {c.id: c for c in wrong}.values():
        mapped = error_map(comparison, *traces)
        if mapped is not None:
            ranks = [_rank_map(rank) for rank in mapped.ranks]
            found.append({"id": str(comparison.id), "shape": mapped.shape, "of": mapped.num_ranks, "ranks": ranks})
        if len(found) == MOST_MAPS:
            break
    return found


def _rank_map(rank: RankMap) -> dict[str, Any]:
    blocks = [value for row in rank.blocks for value in row]
    return {"where": rank.where, "region": rank.region, "rows": len(rank.blocks), "blocks": columns.pack_floats(blocks)}


def _conflicts(comparisons: Sequence[Comparison], traces: tuple[Trace, Trace]) -> list[dict[str, Any]]:
    """Replicas that differ, by axis: how many tensors, the first and the worst of them."""
    found: dict[str, list[Comparison]] = {}
    conflicts = [c for c in comparisons if c.verdict is Verdict.CONFLICT]
    for comparison in conflicts[:MOST_CONFLICTS]:
        for axis in _axes(comparison, traces):
            found.setdefault(axis, []).append(comparison)
    return [
        {
            "axis": axis,
            "count": len(mine),
            "worst": _number(max(c.replica_error for c in mine)),
            "first": str(mine[0].id),
            "looked_at": min(len(conflicts), MOST_CONFLICTS),
            "of": len(conflicts),
        }
        for axis, mine in found.items()
    ]


def _axes(comparison: Comparison, traces: tuple[Trace, Trace]) -> list[str]:
    evidence = Evidence.of(comparison, *traces)
    try:
        return (axes_of_conflict(evidence) if evidence else []) or ["no single axis"]
    except SketchError:
        return ["not known: only sketches were recorded"]


def _coverage(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What was compared by kind, what was not and why, and who said how tensors are cut."""
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
        "layouts": _who(comparisons),
    }


def _who(comparisons: Iterable[Comparison]) -> list[list[Any]]:
    said = Counter("inferred" if c.has_inferred_layout else "stated" if c.by else "nobody" for c in comparisons)
    return [list(item) for item in said.most_common()]


def _power(comparisons: Sequence[Comparison], traces: tuple[Trace, Trace] | None) -> dict[str, Any]:
    """The smallest error that would have been seen, from tolerances alone; `ttrace selftest` tries it."""
    errors: dict[Kind, list[float]] = {}
    for comparison in comparisons:
        if (error := Power(comparison, {}).error) is not None:
            errors.setdefault(comparison.id.kind, []).append(error)
    rows = [
        [kind.value, len(mine), _number(statistics.median(mine)), _number(max(mine))]
        for kind in Kind
        if (mine := errors.get(kind))
    ]
    blind = without_power(comparisons, traces[1]) if traces else {}
    return {"kinds": rows, "blind": [list(item) for item in blind.items()][:_MOST_LISTED], "num_blind": len(blind)}


def _run(about: About) -> dict[str, Any]:
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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
