"""This module compares a candidate's trace with the reference's, and says what kept it from comparing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ttrace.judge.comparison.compare import Comparer
from ttrace.judge.compatibility import check_candidate
from ttrace.judge.engine import HERE, Engine, Progress, lots
from ttrace.judge.findings.common_cause import merge_gradients
from ttrace.judge.findings.data_mismatch import excuse_data, find_data_mismatches, is_from_outside
from ttrace.judge.findings.localize import findings
from ttrace.judge.findings.missing_annotations import (
    doubted,
    excuse_partial_calls,
    unseen_clip,
    unstated_factor,
    without_unstated_sums,
)
from ttrace.judge.findings.missing_modules import absences, explained, with_reasons
from ttrace.judge.findings.randomness import before_random, random_problems
from ttrace.judge.margin import MARGIN
from ttrace.judge.notes.blind_spots import power_notes
from ttrace.judge.notes.depth import depth_notes
from ttrace.judge.notes.environment import surrounding_notes
from ttrace.judge.policy import STRICT, Policy
from ttrace.judge.reason import EXCUSED, Reason, Why
from ttrace.judge.sentences import describe
from ttrace.judge.tensors.factor import factor_note
from ttrace.judge.tensors.rank_names import add_microbatches
from ttrace.judge.tolerance.model import Twins
from ttrace.judge.tolerance.outlier_twins import name_outlying_twins
from ttrace.judge.tolerance.scale import named, together
from ttrace.judge.verdict import Comparison, Finding, Judgement
from ttrace.tensors.ids import Kind
from ttrace.tensors.region import Region
from ttrace.trace.reader import Shard, Trace


def check(
    reference: Trace,
    twins: Sequence[Trace],
    candidate: Trace,
    *,
    margin: float = MARGIN,
    policy: Policy = STRICT,
    progress: Progress | None = None,
) -> Judgement:
    """Judge every tensor that either side recorded."""
    return checked(Twins(reference, twins, margin), candidate, policy=policy, progress=progress)


def checked(
    rounding: Twins,
    candidate: Trace,
    *,
    policy: Policy = STRICT,
    progress: Progress | None = None,
    engine: Engine = HERE,
) -> Judgement:
    """The same with a reference whose twins were measured before: many candidates may share one."""
    reference, twins = rounding.reference, rounding.twins
    check_candidate(candidate, reference)
    comparer = Comparer(reference, rounding, candidate)
    # In the reference's order of appearance; what only the candidate has follows. Whether the reference recomputes is
    # its own affair.
    ids = list(dict.fromkeys([*(t for t in reference.shards if not t.kind.is_recompute), *candidate.shards]))
    sizes = {tensor_id: reference.num_bytes(tensor_id) + candidate.num_bytes(tensor_id) for tensor_id in ids}
    comparisons, done, total = [], 0, sum(sizes.values())
    for comparison in engine.map(Comparer.comparisons, comparer, lots(ids, sizes.__getitem__)):
        comparisons.append(comparison)
        done += sizes[comparison.id]
        if progress is not None:
            progress(done, total)
    if not reference.manifest.isolated:
        # In isolation the module around is right in any case; what is not stated is told by the ordinary run.
        comparisons = without_unstated_sums(comparisons, reference, candidate)
    comparisons = excuse_partial_calls(comparisons, reference, candidate)
    lacking = absences(comparisons, reference, candidate)
    comparisons = with_reasons(comparisons, lacking)
    comparisons, allowed = policy.applied(comparisons)
    factor = unstated_factor(comparisons, candidate) or unseen_clip(comparisons, reference, candidate)
    other_data = find_data_mismatches(comparisons, reference, candidate)
    # Whatever follows from other data, or from a factor that nobody stated, is no finding.
    if other_data:
        comparisons = [excuse_data(comparison) for comparison in comparisons]
    accusable = [c for c in comparisons if not is_from_outside(c)] if other_data else comparisons
    inferred = _inferred_note(comparisons)
    # Every rank tells its own, and often the same.
    problems = dict.fromkeys(problem for trace in (reference, *twins, candidate) for problem in trace.problems())
    found: tuple[Finding, ...] = ()
    if factor is None:
        found = together(accusable, rounding.stats, margin=rounding.scale_margin)
        found = found or tuple(map(named, findings(accusable, reference, candidate)))
        found = tuple(add_microbatches(finding, comparisons, candidate) for finding in explained(found, lacking))
        found = tuple(doubted(finding, comparisons) for finding in merge_gradients(found, comparisons))
    return Judgement(
        tuple(comparisons),
        before_random(found, comparisons, reference, candidate),
        (
            *problems,
            *random_problems(reference, candidate),
            *_nothing_recorded(reference, candidate),
            *_still_twins(rounding),
            *name_outlying_twins(rounding),
            *other_data,
            *map(str, lacking),
            *_idle(candidate, comparisons),
            *([factor] if factor is not None else []),
        ),
        tuple(
            dict.fromkeys(
                [
                    *(surrounding_notes(reference, candidate) if found else ()),
                    *reference.notes,
                    *candidate.notes,
                    *factor_note(reference, candidate),
                    *_alone(candidate),
                    *inferred,
                    *_excused_notes(comparisons),
                    *allowed,
                    *([] if reference.manifest.isolated else depth_notes(comparisons)),
                    *([] if reference.manifest.isolated else power_notes(comparisons, candidate)),
                ]
            )
        ),
    )


def _nothing_recorded(reference: Trace, candidate: Trace) -> Iterator[str]:
    for side, trace in (("reference", reference), ("candidate", candidate)):
        if not any(shards[0].id.kind is Kind.OUTPUT for shards in trace.shards.values()):
            yield (
                f"the {side} recorded no module's output. Does the model run inside `with session.step():`, and is it "
                "the model that was given to ttrace.attach?"
            )


def _still_twins(rounding: Twins) -> Iterator[str]:
    """Twins that nothing has moved say that rounding explains nothing, which is never so."""
    found = [stats for stats in rounding.stats.values() if stats]
    if found and all(s.dd == 0.0 and s.finite_b for stats in found for s in stats):
        yield (
            "the twins are the reference, bit for bit: no floating-point number was nudged, so tolerances are too "
            "narrow. Attach the module through which numbers enter, an embedding for instance."
        )


def _alone(candidate: Trace) -> Iterator[str]:
    if candidate.manifest.num_ranks == 1:
        yield "the candidate ran on one rank: nothing was distributed. If it should be, was torchrun forgotten?"


def _idle(candidate: Trace, comparisons: list[Comparison]) -> Iterator[str]:
    """Axes that cut, sum and distribute nothing: the candidate is not what its author believes."""
    sizes = candidate.mesh.sizes
    idle = {axis for axis, size in sizes.items() if size > 1}
    for comparison in comparisons:
        words = comparison.layout.replace("+", "/").replace(":", "/").split()
        idle -= {word for text in words for word in text.split("/")[1:]}
    for shards in candidate.shards.values():
        if not idle:
            return
        idle -= {axis for axis in idle if _is_divided(shards, axis, sizes[axis])}
    for axis in sorted(idle):
        yield (
            f"axis {axis}={sizes[axis]} cuts, sums and distributes nothing: the {sizes[axis]} ranks along it only "
            "repeat each other. Is the model really parallelised?"
        )


def _is_divided(shards: list[Shard], axis: str, size: int) -> bool:
    """Whether some region of this tensor is not held all along the axis."""
    places: dict[Region | None, set[int]] = {}
    for shard in shards:
        places.setdefault(shard.record.region, set()).add(shard.coord[axis])
    return any(len(held) < size for held in places.values())


def _excused_notes(comparisons: list[Comparison]) -> Iterator[str]:
    """How much was not judged for each reason that does not spoil the verdict."""
    reasons = Counter(comparison.reason for comparison in comparisons)
    sentences = {describe(Why(reason)): reasons[reason] for reason in EXCUSED - {Reason.ALLOWED}}
    for sentence, count in sorted(sentences.items()):
        if count:
            yield f"{count} of {len(comparisons)} tensors were not judged: {sentence}"


def _inferred_note(comparisons: list[Comparison]) -> list[str]:
    count = sum(comparison.has_inferred_layout for comparison in comparisons)
    return [f"{count} of {len(comparisons)} layouts were inferred from shapes"] if count else []
