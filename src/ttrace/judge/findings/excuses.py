"""Missing annotations: what a correct candidate does, and nobody stated: a pending sum, a factor, a clip.

All of them look like bugs at the site itself: a partial sum looks like a missing all-reduce, and gradients before
averaging are too large. The tensors that follow from them show the difference. None of them passes silently: they are
not judged, and the report says what to state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ttrace.judge.causes.registry import find_cause
from ttrace.judge.reason import Reason, Why
from ttrace.judge.tensors.factor import is_before_reduction
from ttrace.judge.verdict import UNEXAMINED, CauseName, Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind, TensorId, is_inside
from ttrace.layouts.source import INFERRED
from ttrace.trace.reader import Trace


def excuse_unstated_sums(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Comparison]:
    """Excuse sites that sum to the reference and are right again in the module around them."""
    wrong = {comparison.id for comparison in comparisons if comparison.verdict.is_wrong}
    right = {comparison.id for comparison in comparisons if comparison.verdict is Verdict.PASS}
    alike = {comparison.id for comparison in comparisons if comparison.verdict in (Verdict.PASS, Verdict.FAIL)}
    result = []
    for comparison in comparisons:
        if comparison.id in wrong and comparison.by == INFERRED and _find_outer(comparison.id, right) is not None:
            comparison = _excuse_pending_sum(comparison, reference, candidate)
        elif comparison.id in wrong and _is_final_reduced(comparison.id, alike):
            comparison = _excuse_reduced_later(comparison, reference, candidate)
        result.append(comparison)
    return result


def excuse_partial_calls(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> list[Comparison]:
    """Excuse results of functions inside modules that a collective has still to sum.

    These are replicas that sum to the reference, and replicas that differ while those of the module's output agree.
    """
    agreeing = {c.id for c in comparisons if c.id.kind is Kind.OUTPUT and c.verdict in (Verdict.PASS, Verdict.FAIL)}
    result = []
    for comparison in comparisons:
        own = comparison.id
        if own.kind.is_of_call and comparison.verdict is Verdict.CONFLICT:
            is_summed_later = any((t.step, t.microbatch, t.name, t.call) == _call_of(own) for t in agreeing)
            if is_summed_later or find_cause(comparison, reference, candidate).name is CauseName.MISSING_ALL_REDUCE:
                comparison = replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.PARTIAL_CALL))
        result.append(comparison)
    return result


def _call_of(tensor_id: TensorId) -> tuple[int, int | None, str, int]:
    return tensor_id.step, tensor_id.microbatch, tensor_id.name, tensor_id.call


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
        f"loss and activation gradients are {factor} x the reference's, final gradients agree: averaging them is still "
        "to come, and nobody stated it. Give attach the model as DDP or FSDP2 wrapped it, or pass "
        f"attach(grad_factor={1 / factor:g})."
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
    """Find the parameters whose cuts nobody stated, with their inferred layouts."""
    return {
        comparison.id.name: comparison.layout
        for comparison in comparisons
        if comparison.id.kind is Kind.PARAM and comparison.has_inferred_layout and "/" in comparison.layout
    }


def add_layout_doubt(finding: Finding, cuts: Mapping[str, str]) -> Finding:
    """Add to an unexplained finding the inferred layouts of the module's parameters: they may be wrong."""
    if finding.cause.name is not CauseName.UNEXPLAINED or finding.cause is UNEXAMINED:
        return finding
    here = [f"{name} ({layout})" for name, layout in cuts.items() if is_inside(name, finding.module)]
    if not here:
        return finding
    words = (
        f"nobody stated how these are cut, it was inferred from their shapes: {', '.join(here[:3])}. Parts of a fused "
        "weight that are cut one by one must be stated, for instance out/tp:fused(3)"
    )
    cause = replace(finding.cause, evidence=(*finding.cause.evidence, words))
    return replace(finding, cause=cause)


def _find_clip(trace: Trace, gradient: TensorId) -> float | None:
    """The factor by which a side clips the gradients of a step, if it was seen and does anything."""
    shards = trace.shards.get(TensorId.of(gradient.step, None, ROOT, Kind.CLIP))
    factor = float(shards[0].tensor()) if shards else 1.0
    return factor if 0.0 < factor < 1.0 else None


def _find_outer(tensor_id: TensorId, right: set[TensorId]) -> TensorId | None:
    """The same kind at the module around this one, if it is right."""
    if tensor_id.name == ROOT or tensor_id.kind not in (Kind.OUTPUT, Kind.GRAD_INPUT):
        return None
    parent = tensor_id.name.rpartition(".")[0] or ROOT
    outer = TensorId.of(tensor_id.step, tensor_id.microbatch, parent, tensor_id.kind)
    return outer if outer in right else None


def _is_final_reduced(tensor_id: TensorId, alike: set[TensorId]) -> bool:
    """Whether a microbatch's gradient is part of a final one of which replicas agree, rightly or not."""
    of_microbatch = tensor_id.kind is Kind.PARAM_GRAD and tensor_id.microbatch is not None
    return of_microbatch and tensor_id._replace(microbatch=None) in alike


def _excuse_reduced_later(comparison: Comparison, reference: Trace, candidate: Trace) -> Comparison:
    if find_cause(comparison, reference, candidate).name is not CauseName.MISSING_ALL_REDUCE:
        return comparison
    return replace(comparison, verdict=Verdict.UNJUDGED, why=Why(Reason.REDUCED_LATER))


def _excuse_pending_sum(comparison: Comparison, reference: Trace, candidate: Trace) -> Comparison:
    found = find_cause(comparison, reference, candidate)
    if found.name is not CauseName.MISSING_ALL_REDUCE:
        return comparison
    why = Why(Reason.UNSTATED_SUM, names=(str(comparison.id.site), str(found.axis)))
    return replace(comparison, verdict=Verdict.UNJUDGED, why=why, suggestion=f"... +{found.axis}")
