"""The words for a set of ranks, and for the microbatches that they ran."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ttrace.judge.verdict import UNEXAMINED, Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import Mesh
from ttrace.trace.reader import Trace

_MOST_NAMED = 4
"""Nobody reads more numbers: a longer list is described by what its members share."""


def name_ranks(ranks: Collection[int], among: Collection[int], mesh: Mesh) -> str:
    """Name some of the ranks: each by its number or, if they are many, by their place on the axis that they share."""
    if len(ranks) <= _MOST_NAMED:
        return f"rank {', '.join(map(str, sorted(ranks)))}"
    return name_by_axis(ranks, among, mesh)[0]


def name_by_axis(ranks: Collection[int], among: Collection[int], mesh: Mesh) -> tuple[str, str | None]:
    """Name ranks by the axis that distinguishes them from the others, and return that axis: "dp rank 1"."""
    for axis, size in mesh.sizes.items():
        places = {mesh.coord(rank)[axis] for rank in ranks}
        alike = {rank for rank in among if mesh.coord(rank)[axis] in places}
        if size > 1 and alike == set(ranks) and len(alike) < len(among):
            return f"{axis} rank{'s' * (len(places) > 1)} {enumerate_few(sorted(places))}", axis
    return f"rank{'s' * (len(ranks) > 1)} {enumerate_few(sorted(ranks))}", None


def enumerate_few(numbers: Sequence[int]) -> str:
    """List numbers in words: all of them, or the first few and how many more."""
    if len(numbers) > _MOST_NAMED:
        return f"{', '.join(map(str, numbers[:_MOST_NAMED]))} and {len(numbers) - _MOST_NAMED} more"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def add_microbatches(findings: Sequence[Finding], comparisons: Sequence[Comparison], candidate: Trace) -> list[Finding]:
    """Add which microbatches are wrong at each finding's site and which ranks ran them, if some are right."""
    by_site: dict[TensorId, list[Comparison]] = {}
    for comparison in comparisons:
        by_site.setdefault(comparison.id._replace(microbatch=None), []).append(comparison)
    sites = (by_site.get(finding.comparison.id._replace(microbatch=None), ()) for finding in findings)
    return [_add_microbatches(finding, site, candidate) for finding, site in zip(findings, sites, strict=True)]


def _add_microbatches(finding: Finding, at_site: Sequence[Comparison], candidate: Trace) -> Finding:
    if finding.comparison.id.microbatch is None or finding.cause is UNEXAMINED:
        return finding
    here = {c.id.microbatch: c for c in at_site}
    wrong = {microbatch: c.id for microbatch, c in here.items() if microbatch is not None and c.verdict.is_wrong}
    right = {mb: c.id for mb, c in here.items() if mb is not None and c.verdict is Verdict.PASS}
    if not wrong or not right:
        return finding
    which = f"microbatch{'es' * (len(wrong) > 1)} {enumerate_few(sorted(wrong))}"
    verb = "are" if len(wrong) > 1 else "is"
    ran, others = (_ranks(ids.values(), candidate) for ids in (wrong, right))
    if ran & others:
        return _add_evidence(finding, f"of {len(wrong) + len(right)} microbatches only {which} {verb} wrong")
    who, axis = name_by_axis(ran, ran | others, candidate.mesh)
    words = f"only {which} {verb} wrong: {'those' if len(wrong) > 1 else 'that'} of {who}"
    if len(wrong) > _MOST_NAMED:
        words = f"only the {len(wrong)} microbatches of {who} are wrong"
    if finding.cause.name is CauseName.UNEXPLAINED:
        return replace(finding, cause=Cause(CauseName.SOME_RANKS, words, axis, finding.cause.evidence))
    return _add_evidence(finding, words)


def _add_evidence(finding: Finding, words: str) -> Finding:
    return replace(finding, cause=replace(finding.cause, evidence=(*finding.cause.evidence, words)))


def _ranks(ids: Collection[TensorId], candidate: Trace) -> set[int]:
    return {shard.coord.rank for tensor_id in ids for shard in candidate.shards.get(tensor_id, ())}
