"""Excuses: what looks like a bug in single tensors, and follows from what was not stated or from other inputs.

- Sums, factors, clipping and layouts that a correct candidate may have and did not state. At the site itself a pending
  sum looks like a missing all-reduce, and gradients before averaging are too large; the tensors that follow show the
  difference. Such tensors are not judged, and the report says what to state.
- Different data: if the two sides got different batches, nothing that depends on them is judged.
- Moved samples: with `--data own`, a sampler may give a rank other rows than the reference's microbatch has. If both
  sides trained on the same rows in total, only what sums over all of them is judged.
- Random numbers: they may differ between layouts even in a correct candidate, and so does what follows from them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttrace.judge.causes import reductions
from ttrace.judge.causes.search import find_cause
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.tensors.logical import LogicalTensor, is_before_reduction, measure
from ttrace.judge.verdict import UNEXAMINED, Cause, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import LABELS, ROOT, Kind, TensorId, is_inside
from ttrace.layouts.placement import INFERRED
from ttrace.trace.reader import Trace

_SUM_DETECTORS = (
    reductions.find_missing_all_reduce,
    reductions.find_missing_average,
    reductions.find_wrong_group,
    reductions.find_missing_all_reduce_before_bias,
)
"""The detectors that explain differing replicas by their sum, in the order of DETECTORS.

An average or a sum over another group may look like a sum with a bias, so it is not enough to ask for missing sums.
"""
_OF_EVERY_MICROBATCH = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.LOSS)
"""The kinds that every microbatch has."""
_MOST_NAMED = 3
_SAME_DATA = ("tp", "pp")
"""Axes along which all ranks need the same data, unless they divide the batch."""
_CLOSE = 0.05
"""Different random numbers change the output of a module that draws by more than this, relative to its size."""


def excuse_unstated_sums(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Comparison]:
    """Excuse replicas that sum to the reference, if what follows from them is right, or agrees again.

    That is the same kind at the module around, or the final gradient of which a microbatch's gradient is a part.
    """
    right = {comparison.id for comparison in comparisons if comparison.verdict is Verdict.PASS}
    agreeing = {comparison.id for comparison in comparisons if comparison.verdict in (Verdict.PASS, Verdict.FAIL)}
    result = []
    for comparison in comparisons:
        is_inner = comparison.by == INFERRED and _is_right_outside(comparison.id, right)
        is_part = not is_inner and _is_final_reduced(comparison.id, agreeing)
        missing = _find_missing_sum(comparison, reference, candidate) if is_inner or is_part else None
        if missing is not None and is_inner:
            why = Why(Reason.UNSTATED_SUM, names=(str(comparison.id.site), str(missing.axis)))
            comparison = replace(comparison, verdict=Verdict.UNJUDGED, why=why, suggestion=f"... +{missing.axis}")
        elif missing is not None:
            comparison = replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.REDUCED_LATER))
        result.append(comparison)
    return result


def excuse_partial_calls(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Comparison]:
    """Excuse results of functions inside a module if a later collective in it sums them.

    Such replicas sum to the reference, or they differ although the replicas of the module's output agree.
    """
    agreeing = {c.id for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict in (Verdict.PASS, Verdict.FAIL)}
    result = []
    for comparison in comparisons:
        own = comparison.id
        if own.kind.is_of_call and comparison.verdict is Verdict.CONFLICT:
            is_summed_later = any((t.step, t.microbatch, t.name, t.call) == _call_of(own) for t in agreeing)
            if is_summed_later or _find_missing_sum(comparison, reference, candidate) is not None:
                comparison = replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.PARTIAL_CALL))
        result.append(comparison)
    return result


def find_unstated_factor(comparisons: Sequence[Comparison], candidate: Trace) -> str | None:
    """Say what to state if everything before reduction is off by one factor, and everything after it is right."""
    wrong = [comparison for comparison in comparisons if comparison.verdict.is_wrong]
    final = [c for c in comparisons if c.id.kind is Kind.PARAM_GRAD and c.id.microbatch is None]
    if not wrong or not final or not all(is_before_reduction(c.id) for c in wrong):
        return None
    if any(is_before_reduction(c.id) and c.verdict is Verdict.PASS and c.stats.aa > 0.0 for c in comparisons):
        return None  # a factor that is still to come is missing everywhere
    scales = [comparison.stats.scale for comparison in wrong]
    sizes = {size for size in candidate.sizes.values() if size > 1}
    factor = next((size for size in sizes if all(math.isclose(scale, size, rel_tol=1e-2) for scale in scales)), None)
    if factor is None:
        return None
    return (
        f"loss and activation gradients are {factor} x the reference's, final gradients agree: the candidate averages "
        "them after backward, which was not stated. Pass the model to attach as DDP or FSDP2 wrapped it, or pass "
        f"attach(grad_factor={1 / factor:g}). An adapter overrides grad_factor."
    )


def find_unseen_clip(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> str | None:
    """Say what to do if all final gradients differ by one side's clip factor, and updates are right."""
    wrong = [c for c in comparisons if c.verdict.is_wrong and c.id.kind not in (Kind.GRAD_NORM, Kind.CLIP)]
    if not wrong or not all(c.id.kind is Kind.PARAM_GRAD and c.id.microbatch is None for c in wrong):
        return None
    if not any(c.id.kind is Kind.UPDATE and c.verdict is Verdict.PASS for c in comparisons):
        return None
    ours, theirs = (_find_clip(trace, wrong[0].id) for trace in (reference, candidate))
    if ours is not None and theirs is None:
        seen, hidden, clip, factor = "reference", "candidate", ours, ours
    elif theirs is not None and ours is None:
        seen, hidden, clip, factor = "candidate", "reference", theirs, 1 / theirs
    else:
        return None
    if not all(math.isclose(c.stats.scale, factor, rel_tol=1e-2) for c in wrong):
        return None
    return (
        f"final gradients differ by {clip:.4g}, the factor by which the {seen} clips them, and updates agree: the "
        f"{hidden} clips by hand, which TTrace does not see, and its gradients were read after that. Clip on both "
        "sides with torch.nn.utils.clip_grad_norm_ or clip_grads_with_norm_, or on both by hand."
    )


def find_inferred_cuts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Find the parameters whose cuts were inferred, not stated, with their inferred layouts."""
    return {
        comparison.id.name: comparison.layout
        for comparison in comparisons
        if comparison.id.kind is Kind.PARAM and comparison.has_inferred_layout and "/" in comparison.layout
    }


def add_layout_doubt(finding: Finding, cuts: Mapping[str, str]) -> Finding:
    """Add the inferred layouts of the module's parameters to an unexplained finding, because they may be wrong."""
    if finding.cause.name is not CauseName.UNEXPLAINED or finding.cause is UNEXAMINED:
        return finding
    here = [f"{name} ({layout})" for name, layout in cuts.items() if is_inside(name, finding.module)]
    if not here:
        return finding
    words = (
        f"the layouts of these parameters were inferred from their shapes: {', '.join(here[:3])}. If the parts of a "
        "fused weight are cut one by one, state it, for instance out/tp:fused(3)"
    )
    cause = replace(finding.cause, evidence=(*finding.cause.evidence, words))
    return replace(finding, cause=cause)


def find_data_mismatches(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[str]:
    """Describe how the data of the two sides differ, one sentence for each difference."""
    counts = _compare_microbatches(reference, candidate)
    if counts:
        return [counts]
    batches = [c for c in comparisons if c.id.kind is Kind.BATCH]
    # If batches were recorded, a model's input that differs was made from them by the candidate's own code.
    outside = batches or [c for c in comparisons if c.id.is_data]
    if any(_is_of_other_step(c, reference, candidate) for c in outside):
        return []  # after a checkpoint, the position in the data is judged too
    sentences = [sentence for sentence in map(_explain_other_data, outside) if sentence]
    return sentences or _explain_unknown_labels(comparisons, (reference, candidate))


def is_labels(tensor_id: TensorId) -> bool:
    """Whether this is a record of labels that do not pass through the model."""
    return tensor_id.kind is Kind.BATCH and tensor_id.name == LABELS


def excuse_data(comparison: Comparison) -> Comparison:
    """Excuse a wrong tensor because the data differ; initial parameters and buffers do not depend on data."""
    is_start = comparison.id.kind in (Kind.PARAM, Kind.BUFFER) and comparison.id.step == 0
    if is_start or comparison.id.is_data or not comparison.verdict.is_wrong:
        return comparison
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.OTHER_DATA))


@dataclass(frozen=True)
class Samples:
    """The samples of both sides over all ranks, microbatches and steps, in the slot that differs most."""

    num_rows: int
    """The number of rows of the reference."""
    num_common: int
    """The number of these rows that the candidate had too."""
    num_others: int
    """The number of the candidate's rows that the reference did not have."""

    @property
    def num_different(self) -> int:
        return self.num_rows - self.num_common + self.num_others


def count_samples(reference: Trace, candidate: Trace) -> Samples | None:
    """Count the samples of both sides; None unless both scripts kept their data.

    Several ranks of the candidate may have the same sample if each sample is on the same number of ranks.
    """
    ours, theirs = _count_rows(reference), _count_rows(candidate)
    if not ours or not theirs:
        return None
    slots = [_compare_slot(ours.get(slot, Counter()), theirs.get(slot, Counter())) for slot in {**ours, **theirs}]
    return max(slots, key=lambda slot: (slot.num_different, slot.num_rows))


def describe_other_samples(samples: Samples) -> str:
    return (
        f"the two sides trained on different samples: of the reference's {samples.num_rows} rows, the candidate had "
        f"{samples.num_common}, and {samples.num_others} others. Make both sides load the same ones, or run without "
        "--data own."
    )


def note_moved_samples(samples: Samples) -> str:
    return (
        f"both sides trained on the same {samples.num_rows} rows, but not each rank and microbatch on the same ones: "
        "only what sums over all of them was judged"
    )


def excuse_moved_samples(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Excuse what depends on which samples are in a microbatch: its own tensors, and statistics of batches."""
    return [_excuse_moved(comparison) for comparison in comparisons]


@dataclass(frozen=True)
class RepeatedRows:
    """The script's own rows that generated data replaced, where the candidate has fewer different ones."""

    num_reference: int
    num_candidate: int
    num_samples: int
    """The length of the dataset that every rank draws as a whole, instead of a part of it; 0 if that is not known."""
    axes: tuple[str, ...]
    """The axes along which a framework reduces gradients, so along them ranks need rows of their own."""

    @property
    def is_proven(self) -> bool:
        """Whether it is known that ranks must have different rows, and that there are more of them."""
        return bool(self.axes) and self.num_samples > self.num_reference

    def describe(self) -> str:
        loaded = (
            f"where the reference loaded {self.num_reference} different rows, the candidate loaded only "
            f"{self.num_candidate}"
        )
        if self.is_proven:
            return (
                f"the ranks along {', '.join(self.axes)} loaded the same rows: {loaded}, and the loader of each rank "
                f"goes through all {self.num_samples} samples. Give the loader a DistributedSampler, or let each rank "
                "load its own part. With --data own, the data are judged, too."
            )
        return (
            f"the script's own data were replaced, and are not judged. But {loaded}, some on several ranks. Does each "
            "data-parallel rank load its own? With --data own, the data are judged, too"
        )


def find_repeated_rows(reference: Trace, candidate: Trace) -> RepeatedRows | None:
    """Find out whether the candidate loaded as many rows as the reference, but at most half as many different ones.

    Generated data replaced them on every rank, so no tensor shows it. Scripts may shuffle differently, so it does not
    matter which rows were loaded, only how many different ones. Only slots in which all rows of the reference differ
    are compared: labels of a few classes are equal by chance.
    """
    ours, theirs = _count_rows(reference, "replaced"), _count_rows(candidate, "replaced")
    distinct = {slot: rows for slot, rows in ours.items() if 1 < len(rows) == rows.total()}
    if not distinct or not all(_is_repeated(rows, theirs.get(slot, Counter())) for slot, rows in distinct.items()):
        return None
    sizes = candidate.mesh.sizes
    return RepeatedRows(
        sum(map(len, distinct.values())),
        sum(len(theirs[slot]) for slot in distinct),
        min((rank.end.num_samples if rank.end else 0 for rank in candidate.ranks), default=0),
        tuple(axis for axis in sizes if axis in candidate.reduced and sizes[axis] > 1),
    )


def note_different_rows(candidate: Trace) -> Iterator[str]:
    """Note axes along which ranks need the same rows, and loaded different ones."""
    own = {rank.manifest.rank: rank.end.replaced for rank in candidate.ranks if rank.end}
    for part in candidate.mesh.factorisations:
        for axis, _ in part:
            if (
                axis in _SAME_DATA
                and axis not in candidate.batch_axes
                and _loads_differently(own, candidate, [a for a, _ in part if a != axis])
            ):
                yield (
                    f"the ranks of {axis} have the same part of the batch, but loaded different rows, which were "
                    f"replaced and are not judged. Do all ranks of {axis} load the same data?"
                )


def _loads_differently(own: Mapping[int, Mapping[str, Sequence[str]]], candidate: Trace, others: Sequence[str]) -> bool:
    """Whether two ranks with the same place on these other axes loaded different rows."""
    first: dict[tuple[object, ...], list[str]] = {}
    for number, slots in own.items():
        coord = candidate.mesh.coord(number)
        place = tuple(coord[axis] for axis in others)
        for slot, rows in slots.items():
            if first.setdefault((slot, *place), sorted(rows)) != sorted(rows):
                return True
    return False


@dataclass(frozen=True)
class Draws:
    """The modules of each side that drew random numbers, except those that drew the same on both sides."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


def find_draws(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> Draws:
    """Find the modules that drew random numbers, except where outputs agree closely: there, all drew the same."""
    outputs: dict[str, bool] = {}
    for comparison in comparisons:
        if comparison.id.kind is Kind.OUTPUT:
            outputs[comparison.id.name] = outputs.get(comparison.id.name, True) and _agrees_closely(comparison)
    sides = (tuple(name for name in trace.random if not outputs.get(name, False)) for trace in (reference, candidate))
    return Draws(*sides)


def describe_random_numbers(draws: Draws) -> Iterator[str]:
    """Describe which modules drew random numbers, for each side or for both."""
    sides = {"reference": draws.reference, "candidate": draws.candidate}
    drawing = [side for side, modules in sides.items() if modules]
    if len(drawing) == 2 and set(draws.reference) == set(draws.candidate):
        yield _describe_modules("reference and candidate", draws.reference)
    else:
        yield from (_describe_modules(f"the {side}", sides[side]) for side in drawing)


def drop_random_findings(
    findings: tuple[Finding, ...], comparisons: Sequence[Comparison], draws: Draws
) -> tuple[Finding, ...]:
    """Keep the findings that random numbers cannot explain: those before the first tensor that depends on them."""
    places = {comparison.id: i for i, comparison in enumerate(comparisons)}
    random = (i for i, comparison in enumerate(comparisons) if _is_random(comparison, draws))
    first = next(random, len(places))
    return tuple(finding for finding in findings if places[finding.comparison.id] < first)


def _is_right_outside(tensor_id: TensorId, right: set[TensorId]) -> bool:
    """Whether the same kind is right at the module around this one."""
    if tensor_id.name == ROOT or tensor_id.kind not in (Kind.OUTPUT, Kind.GRAD_INPUT):
        return False
    parent = tensor_id.name.rpartition(".")[0] or ROOT
    return TensorId.of(tensor_id.step, tensor_id.microbatch, parent, tensor_id.kind) in right


def _is_final_reduced(tensor_id: TensorId, agreeing: set[TensorId]) -> bool:
    """Whether this is a microbatch's part of a final gradient whose replicas agree, be it right or wrong."""
    is_of_microbatch = tensor_id.kind is Kind.PARAM_GRAD and tensor_id.microbatch is not None
    return is_of_microbatch and tensor_id._replace(microbatch=None) in agreeing


def _find_missing_sum(comparison: Comparison, reference: Trace, candidate: Trace) -> Cause | None:
    """Find the all-reduce that replicas lack; asks only the detectors that know of sums, not all of them."""
    if comparison.verdict is not Verdict.CONFLICT:
        return None
    cause = find_cause(comparison, reference, candidate, _SUM_DETECTORS)
    return cause if cause.name is CauseName.MISSING_ALL_REDUCE else None


def _call_of(tensor_id: TensorId) -> tuple[int, int | None, str, int]:
    return tensor_id.step, tensor_id.microbatch, tensor_id.name, tensor_id.call


def _find_clip(trace: Trace, gradient: TensorId) -> float | None:
    """Find the factor by which a side clips the gradients of a step; None if none was recorded, or if it is 1."""
    shards = trace.shards.get(TensorId.of(gradient.step, None, ROOT, Kind.CLIP))
    factor = float(shards[0].tensor()) if shards else 1.0
    return factor if 0.0 < factor < 1.0 else None


def _explain_unknown_labels(comparisons: Sequence[Comparison], sides: Sequence[Trace]) -> list[str]:
    """Say that labels may differ, if it is not known where they enter and the loss is the first to differ."""
    attachments = [side.manifest.attachment for side in sides]
    if all(attachment is None or attachment.labels for attachment in attachments):
        return []
    wrong = {c.id.kind for c in comparisons if c.verdict.is_wrong}
    if Kind.LOSS not in wrong or wrong & {Kind.INPUT, Kind.OUTPUT}:
        return []
    return [
        "the losses differ although the model's outputs agree, and it is not known where labels enter: either the loss "
        "is wrong, or the two sides use different labels. Load them with a DataLoader, pass them to a loss of "
        "torch.nn.functional, or call ttrace.attach and session.batch in the script."
    ]


def _compare_microbatches(reference: Trace, candidate: Trace) -> str:
    first = candidate.manifest.first_step
    ours, theirs = _find_microbatches(reference, first), _find_microbatches(candidate, first)
    if not ours or not theirs or ours == theirs:
        return ""
    num_ours, num_theirs = _count_first_step(ours), _count_first_step(theirs)
    rows = _find_num_rows(reference)
    part = f"{rows} / {num_theirs} rows" if num_ours == 1 and rows and rows % num_theirs == 0 else "some of the rows"
    return (
        f"the two sides trained on different data: the reference ran {_describe(reference, num_ours)}, the candidate "
        f"ran {_describe(candidate, num_theirs)}. Nothing that depends on the data was judged. Let the reference run "
        f"the candidate's {num_theirs} microbatches too (accumulate their gradients, each loss divided by "
        f"{num_theirs}), or give each rank {part} of the reference's batch."
    )


def _find_microbatches(trace: Trace, first_step: int) -> frozenset[tuple[int, int]]:
    return frozenset(
        (tensor_id.step, tensor_id.microbatch)
        for tensor_id in trace.shards
        if tensor_id.kind in _OF_EVERY_MICROBATCH and tensor_id.microbatch is not None and tensor_id.step >= first_step
    )


def _count_first_step(microbatches: frozenset[tuple[int, int]]) -> int:
    first = min(step for step, _ in microbatches)
    return sum(step == first for step, _ in microbatches)


def _describe(trace: Trace, num_microbatches: int) -> str:
    rows, sizes = _find_num_rows(trace), trace.mesh.sizes
    ranks = f" on {' '.join(f'{axis}={size}' for axis, size in sizes.items())}" if trace.manifest.num_ranks > 1 else ""
    count = f"{num_microbatches} microbatch{'es' if num_microbatches > 1 else ''}"
    return f"{count}{f' of {rows} rows' if rows else ''}{ranks}"


def _find_num_rows(trace: Trace) -> int | None:
    """Count the rows of the first batch of a rank, by its first dim; None if no batch was recorded."""
    for tensor_id, shards in trace.shards.items():
        if tensor_id.is_data and shards[0].record.shape:
            return shards[0].record.shape[0]
    return None


def _explain_other_data(comparison: Comparison) -> str:
    """Describe how a tensor that enters from outside differs between the sides; empty if it is equal bit for bit."""
    if comparison.verdict.is_wrong or comparison.error > 0.0:
        count, worst = comparison.num_different, max(comparison.error, comparison.replica_error)
        how = f"by {worst:.1e}" if count is None else f"in {count} of {comparison.stats.count} elements"
        return (
            f"{comparison.id}: the candidate was fed other data than the reference (they differ {how}). "
            "Pass the batch through session.batch(...), or make both sides load the same."
        )
    if comparison.spoils:
        return (
            f"{comparison.id}: it is not known whether both sides were fed the same data: {describe(comparison.why)}. "
            "Nothing that depends on it was judged. Pass the same tensors through session.batch(...) on both sides."
        )
    return ""


def _is_of_other_step(comparison: Comparison, reference: Trace, candidate: Trace) -> bool:
    """Whether a candidate that resumes from a checkpoint got the reference's data of another step."""
    own = comparison.id
    if not candidate.manifest.first_step or not comparison.verdict.is_wrong:
        return False
    theirs = LogicalTensor.of(candidate, own)
    steps = {other.step for other in reference.shards} - {own.step}
    ours = (LogicalTensor.of(reference, own._replace(step=step)) for step in sorted(steps))
    return theirs is not None and any(
        one is not None and one.shape == theirs.shape and measure(one, theirs)[0].dd == 0.0 for one in ours
    )


def _excuse_moved(comparison: Comparison) -> Comparison:
    tensor_id = comparison.id
    is_of_microbatch = tensor_id.microbatch is not None or tensor_id.kind is Kind.BUFFER_AFTER
    if not is_of_microbatch or comparison.verdict is Verdict.PASS:
        return comparison
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.MOVED_SAMPLES), tolerance=None)


def _is_repeated(ours: Counter[str], theirs: Counter[str]) -> bool:
    return theirs.total() >= ours.total() and 2 * len(theirs) <= len(ours)


def _count_rows(trace: Trace, which: Literal["samples", "replaced"] = "samples") -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for rank in trace.ranks:
        for slot, rows in (getattr(rank.end, which) if rank.end else {}).items():
            counts.setdefault(slot, Counter()).update(rows)
    return counts


def _compare_slot(ours: Counter[str], theirs: Counter[str]) -> Samples:
    num_replicas = max(1, theirs.total() // ours.total()) if ours else 1
    expected = Counter({row: count * num_replicas for row, count in ours.items()})
    common = (expected & theirs).total()
    return Samples(ours.total(), common // num_replicas, theirs.total() - common)


def _agrees_closely(comparison: Comparison) -> bool:
    tolerance = comparison.tolerance
    return comparison.verdict is Verdict.PASS and tolerance is not None and tolerance.value < _CLOSE


def _is_random(comparison: Comparison, draws: Draws) -> bool:
    """Whether this is wrong in a module that drew random numbers, or the output of one that drew in the reference.

    If the reference draws, its twins do too. Tolerances are then so wide that the module passes, and what follows is
    wrong or right by chance (tests/capture/observe/test_rng_use.py::test_both_sides_are_told_in_one_sentence).
    """
    name = comparison.id.name
    if comparison.id.kind is Kind.OUTPUT and any(is_inside(name, module) for module in draws.reference):
        return True
    return comparison.verdict.is_wrong and any(is_inside(name, m) for m in (*draws.reference, *draws.candidate))


def _describe_modules(sides: str, modules: Sequence[str]) -> str:
    named = ", ".join("the model itself" if name == ROOT else name for name in modules[:_MOST_NAMED])
    more = f" and {len(modules) - _MOST_NAMED} more modules" if len(modules) > _MOST_NAMED else ""
    return (
        f"{sides} drew random numbers in {named}{more}: what follows from them differs between layouts even if nothing "
        "is wrong. If that is F.dropout, or dropout_p of F.scaled_dot_product_attention, set it to 0 while tracing, "
        "or put the module into evaluation mode."
    )
