"""The check: a candidate's trace compared with the reference's, stage by stage.

Compare every tensor, excuse differences that a correct candidate has and those that the policy allows, find what keeps
tensors from being judged, find where wrong tensors start, and collect the notes. Each stage is a function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttrace.judge.communication import Communication
from ttrace.judge.compare import Comparer
from ttrace.judge.compatibility import check_candidate
from ttrace.judge.depth import note_depth
from ttrace.judge.engine import HERE, Engine, OnProgress, make_lots
from ttrace.judge.findings.excuses import (
    add_layout_doubt,
    count_samples,
    describe_other_samples,
    describe_random_numbers,
    drop_random_findings,
    excuse_data,
    excuse_moved_samples,
    excuse_partial_calls,
    excuse_unstated_sums,
    find_data_mismatches,
    find_draws,
    find_inferred_cuts,
    find_repeated_rows,
    find_unseen_clip,
    find_unstated_factor,
    is_labels,
    note_different_rows,
    note_moved_samples,
)
from ttrace.judge.findings.global_scale import find_global_scale, name_mis_scaled
from ttrace.judge.findings.hidden import add_hidden, find_hidden, mark_hidden
from ttrace.judge.findings.initial_values import note_stale_gradients
from ttrace.judge.findings.missing_modules import Absence, add_absences, explain_by_absences, find_absences
from ttrace.judge.findings.operations import add_ledger, find_operations
from ttrace.judge.findings.origins import find_origins, merge_gradients
from ttrace.judge.findings.settings import note_settings
from ttrace.judge.margin import MARGIN
from ttrace.judge.notes import note_attachment, note_communication, note_dropout, note_environment, note_log_probs
from ttrace.judge.policy import STRICT, Policy
from ttrace.judge.reach import measure_reach
from ttrace.judge.reason import EXCUSED, SETTINGS, Reason, Why, describe
from ttrace.judge.tensors.difference import add_microbatches
from ttrace.judge.tensors.logical import note_factor
from ttrace.judge.tolerance.model import ToleranceModel, describe_outlying_twins
from ttrace.judge.verdict import Comparison, Finding, Judgement, WrongOperations
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.reader import Shard, Trace


def check(
    reference: Trace,
    twins: Sequence[Trace],
    candidate: Trace,
    *,
    margin: float = MARGIN,
    policy: Policy = STRICT,
    progress: OnProgress | None = None,
) -> Judgement:
    """Judge every tensor that either side recorded."""
    rounding = ToleranceModel.measure(reference, twins, margin)
    return judge_candidate(rounding, candidate, policy=policy, progress=progress)


def judge_candidate(
    rounding: ToleranceModel,
    candidate: Trace,
    *,
    policy: Policy = STRICT,
    progress: OnProgress | None = None,
    engine: Engine = HERE,
) -> Judgement:
    """Judge a candidate by tolerances that are already measured: many candidates may share them."""
    reference = rounding.reference
    check_candidate(candidate, reference)
    comparisons = _compare_all(rounding, candidate, engine, progress)
    comparisons = _excuse_unstated(comparisons, reference, candidate)
    absences = find_absences(comparisons, reference, candidate)
    hidden = find_hidden(comparisons, reference, candidate)
    comparisons, hidden, allowances = policy.apply(add_absences(comparisons, absences), hidden)
    obstacles = _find_obstacles(comparisons, reference, candidate)
    if obstacles.moved_samples:
        comparisons = excuse_moved_samples(comparisons)
    if obstacles.other_data:
        comparisons = [excuse_data(comparison) for comparison in comparisons]
    findings = _find_causes(comparisons, obstacles, absences, rounding, candidate)
    draws = find_draws(comparisons, reference, candidate)
    findings = drop_random_findings(findings, comparisons, draws)
    if obstacles.factor is not None:  # learning rates and eps may be scaled by a factor of the gradients
        hidden = [each for each in hidden if each[1].reason not in SETTINGS]
    comparisons = mark_hidden(comparisons, hidden)
    findings = add_hidden(findings, comparisons, hidden, candidate)
    problems = [
        *_collect_problems(rounding, candidate),
        *describe_random_numbers(draws),
        *obstacles.other_data,
        *map(str, absences),
        *_describe_idle_axes(candidate, comparisons),
    ]
    if obstacles.factor is not None:
        problems.append(obstacles.factor)
    notes = [*obstacles.moved_samples, *_collect_notes(comparisons, findings, allowances, reference, candidate)]
    return Judgement(
        tuple(comparisons),
        findings,
        tuple(problems),
        tuple(notes),
        find_operations(comparisons, candidate) if candidate.manifest.isolated else WrongOperations(),
        None if reference.manifest.isolated else measure_reach(comparisons, reference, candidate),
    )


def _compare_all(
    rounding: ToleranceModel, candidate: Trace, engine: Engine, progress: OnProgress | None
) -> list[Comparison]:
    """Compare every tensor, in the reference's order of appearance; what only the candidate has follows."""
    reference = rounding.reference
    ids = _choose_ids(reference, candidate)
    sizes = {tensor_id: reference.num_bytes(tensor_id) + candidate.num_bytes(tensor_id) for tensor_id in ids}
    comparisons, done, total = [], 0, sum(sizes.values())
    comparer = Comparer(reference, rounding, candidate)
    for comparison in engine.map(Comparer.comparisons, comparer, make_lots(ids, sizes.__getitem__)):
        comparisons.append(comparison)
        done += sizes[comparison.id]
        if progress is not None:
            progress(done, total)
    return comparisons


def _choose_ids(reference: Trace, candidate: Trace) -> list[TensorId]:
    """Choose what is compared: not the reference's recomputations, and no labels that only one side has."""
    first = candidate.manifest.first_step
    ours = (t for t in reference.shards if not t.kind.is_recompute and (t.step >= first or _is_left_by(t, first)))
    unplaced = {t for t in reference.shards.keys() ^ candidate.shards.keys() if is_labels(t)}
    return [t for t in dict.fromkeys([*ours, *candidate.shards]) if t not in unplaced]


def _is_left_by(tensor_id: TensorId, first: int) -> bool:
    """Whether this is a state that a run which continues from a checkpoint has before its first step."""
    return tensor_id.step == first - 1 and tensor_id.kind is Kind.OPTIM


def _excuse_unstated(comparisons: list[Comparison], reference: Trace, candidate: Trace) -> list[Comparison]:
    """Excuse sums that no annotation states, but that a correct candidate has."""
    if not reference.manifest.isolated:
        # In isolation the surrounding module is always right, so only the ordinary run shows what is not stated.
        comparisons = excuse_unstated_sums(comparisons, reference, candidate)
    return excuse_partial_calls(comparisons, reference, candidate)


@dataclass(frozen=True)
class _Obstacles:
    """What keeps wrong tensors from being findings, in words."""

    other_data: Sequence[str] = ()
    moved_samples: Sequence[str] = ()
    """The same data in total, but not in each microbatch."""
    factor: str | None = None
    """A factor of gradients that no annotation states."""


def _find_obstacles(comparisons: list[Comparison], reference: Trace, candidate: Trace) -> _Obstacles:
    other_data = find_data_mismatches(comparisons, reference, candidate)
    samples = count_samples(reference, candidate) if other_data else None
    if samples is not None and not samples.num_different:
        return _Obstacles(moved_samples=[note_moved_samples(samples)])
    if samples is not None:
        other_data = [describe_other_samples(samples)]
    factor = find_unstated_factor(comparisons, candidate) or find_unseen_clip(comparisons, reference, candidate)
    return _Obstacles(other_data, factor=factor)


def _find_causes(
    comparisons: list[Comparison],
    obstacles: _Obstacles,
    absences: Sequence[Absence],
    rounding: ToleranceModel,
    candidate: Trace,
) -> tuple[Finding, ...]:
    """Find where wrong tensors start, and why."""
    if obstacles.factor is not None:
        return ()
    accusable = [c for c in comparisons if not (obstacles.other_data and c.id.is_data)]
    origins = find_global_scale(accusable, rounding.stats, margin=rounding.scale_margin)
    if not origins:
        origins = tuple(map(name_mis_scaled, find_origins(accusable, rounding.reference, candidate)))
    explained = add_microbatches(explain_by_absences(origins, absences), comparisons, candidate)
    communication, cuts = Communication(candidate), find_inferred_cuts(comparisons)
    return tuple(
        add_ledger(add_layout_doubt(finding, cuts), communication)
        for finding in merge_gradients(tuple(explained), comparisons)
    )


def _collect_problems(rounding: ToleranceModel, candidate: Trace) -> Iterator[str]:
    """Describe what keeps the whole run from being judged, as far as the traces alone show it."""
    reference = rounding.reference
    # Ranks often report the same problems.
    traces = (reference, *rounding.twins, candidate)
    yield from dict.fromkeys(problem for trace in traces for problem in trace.problems())
    yield from _describe_empty_sides(reference, candidate)
    if (repeated := find_repeated_rows(reference, candidate)) is not None and repeated.is_proven:
        yield repeated.describe()
    yield from _describe_still_twins(rounding)
    yield from _describe_zero_gradients(rounding)
    yield from describe_outlying_twins(rounding)


def _collect_notes(
    comparisons: list[Comparison],
    findings: tuple[Finding, ...],
    allowances: Sequence[str],
    reference: Trace,
    candidate: Trace,
) -> tuple[str, ...]:
    is_trained = any(kind.is_of_param and kind is not Kind.PARAM for kind in {c.id.kind for c in comparisons})
    repeated = find_repeated_rows(reference, candidate)
    notes = [
        *(note_environment(reference, candidate) if findings else ()),
        *note_attachment(reference, candidate),
        *reference.notes,
        *candidate.notes,
        *note_dropout(reference, candidate),
        *note_factor(reference, candidate),
        *(_note_one_rank(candidate) if is_trained else ()),
        *_note_inferred_layouts(comparisons),
        *_note_excused(comparisons),
        *note_settings(reference, candidate),
        *_note_choices(comparisons),
        *note_communication(candidate),
        *note_log_probs(comparisons, reference, candidate),
        *([repeated.describe()] if repeated is not None and not repeated.is_proven else ()),
        *note_different_rows(candidate),
        *note_stale_gradients(reference),
        *allowances,
    ]
    if not reference.manifest.isolated:
        notes += note_depth(comparisons)
    return tuple(dict.fromkeys(notes))


def _describe_empty_sides(reference: Trace, candidate: Trace) -> Iterator[str]:
    for side, trace in (("reference", reference), ("candidate", candidate)):
        if not any(shards[0].id.kind is Kind.OUTPUT for shards in trace.shards.values()):
            yield (
                f"the {side} recorded no module's output. Does the model run inside `with session.step():`, and is it "
                "the model that was given to ttrace.attach?"
            )


def _describe_still_twins(rounding: ToleranceModel) -> Iterator[str]:
    """Twins that equal the reference would mean that rounding explains nothing, which is never true."""
    measured = [each for stats in rounding.stats.values() for each in stats]
    if measured and all(stats.dd == 0.0 and stats.finite_b for stats in measured):
        yield (
            "the twins are the reference, bit for bit: no floating-point number was nudged, so tolerances are too "
            "narrow. Attach the module through which numbers enter, an embedding for instance."
        )


def _describe_zero_gradients(rounding: ToleranceModel) -> Iterator[str]:
    """With gradients of zero, two trainings agree whatever happens to their gradients."""
    gradients = {t: s for t, s in rounding.stats.items() if t.kind in (Kind.PARAM_GRAD, Kind.MAIN_GRAD)}
    is_measured = any(gradients.values()) and not rounding.reference.manifest.isolated
    if is_measured and all(s.aa == 0.0 and s.finite_a for stats in gradients.values() for s in stats):
        yield (
            "no parameter of the reference has a gradient other than zero, so nothing was tested about gradients. "
            "Does the loss depend on the model's parameters, and does its weight or its mask leave anything of it?"
        )


def _note_one_rank(candidate: Trace) -> Iterator[str]:
    if candidate.manifest.num_ranks == 1:
        yield "the candidate ran on one rank: nothing was distributed. If it should be, was torchrun forgotten?"


def _describe_idle_axes(candidate: Trace, comparisons: list[Comparison]) -> Iterator[str]:
    """Describe axes that cut, sum and distribute nothing: the model may not be parallelised as its author believes."""
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
    """Whether some region of this tensor is not held by all ranks along the axis."""
    places: dict[Region | None, set[int]] = {}
    for shard in shards:
        places.setdefault(shard.record.region, set()).add(shard.coord[axis])
    return any(len(held) < size for held in places.values())


def _note_excused(comparisons: list[Comparison]) -> Iterator[str]:
    """Note how many tensors were not judged, for each reason that does not spoil the verdict."""
    reasons = Counter(comparison.reason for comparison in comparisons)
    sentences = {describe(Why(reason)): reasons[reason] for reason in EXCUSED - {Reason.ALLOWED}}
    for sentence, count in sorted(sentences.items()):
        if count:
            yield f"{count} of {len(comparisons)} tensors were not judged: {sentence}"


def _note_choices(comparisons: list[Comparison]) -> Iterator[str]:
    """Note how many discrete choices differ and were excused because their scores are nearly equal.

    Nothing is concluded from them: twins replay the reference's choices, so it is not known how many rounding flips,
    and a preference of a few choices for some experts may be chance.
    """
    tied = [c.why for c in comparisons if c.why is not None and c.reason is Reason.CHOICES_TIED]
    if tied:
        count, total = sum(why.count for why in tied), sum(why.total for why in tied)
        yield (
            f"{count} of {total} choices differ, in {len(tied)} tensor{'s' * (len(tied) > 1)}, "
            "all within rounding of a tie: a small wrong preference, for some experts for instance, would look the same"
        )


def _note_inferred_layouts(comparisons: list[Comparison]) -> Iterator[str]:
    count = sum(comparison.has_inferred_layout for comparison in comparisons)
    if count:
        yield f"{count} of {len(comparisons)} layouts were inferred from shapes"
