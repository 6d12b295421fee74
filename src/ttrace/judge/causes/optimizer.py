"""Causes in the optimizer's step: an update that is left out, done twice, clipped, or not the same in all copies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure, measure_shards
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, STEP, Kind, TensorId
from ttrace.trace.reader import Settings, Shard, Trace


@cause(
    CauseName.NOT_LOADED,
    after="find_not_finite",
    shown_by="the checkpoint changed others, and this parameter or buffer still holds what it was initialised with",
    unproven="entries of the zoo are loaded from older values; tests/workflow/test_resume.py",
)
def find_not_loaded(e: Evidence) -> Cause | None:
    """Find a parameter or buffer that a checkpoint should have replaced."""
    tensor_id = e.comparison.id
    if tensor_id.kind not in (Kind.PARAM, Kind.BUFFER) or tensor_id.name not in e.candidate_trace.unloaded:
        return None
    return Cause(
        CauseName.NOT_LOADED, "not loaded: the checkpoint changed others, and this one is as it was initialised"
    )


@cause(
    CauseName.NOT_UPDATED,
    after="find_not_loaded",
    shown_by="an update that is zero, everywhere or on some ranks",
    fault="left out of optimizer",
)
def find_not_updated(e: Evidence) -> Cause | None:
    """Find a parameter that did not change: everywhere, or on some ranks while others have the right update."""
    if e.comparison.id.kind is not Kind.UPDATE or e.stats.aa == 0.0:
        return None
    if e.comparison.verdict is Verdict.FAIL and e.stats.bb == 0.0:
        return Cause(CauseName.NOT_UPDATED, "the optimizer left this parameter as it was")
    shards = [(piece, shard) for piece in e.candidate.pieces for shard in piece.summands[0]]
    stale = [shard for _, shard in shards if _is_zero(shard)]
    rest = [pair for pair in shards if pair[1] not in stale]
    if not stale or not rest or e.candidate.pending:
        return None
    error = max(e.error_of(_take_alone(e.candidate, piece, shard)) for piece, shard in rest)
    if error > e.tolerance:
        return None
    ranks = sorted({shard.coord.rank for shard in stale})
    return Cause(
        CauseName.NOT_UPDATED,
        f"rank {', '.join(map(str, ranks))} left this parameter as it was: the update never arrived there",
        evidence=(f"the update of all other ranks is the reference's to {error:.1e}",),
    )


@cause(
    CauseName.OPTIMIZER_SETTINGS,
    after="find_not_updated",
    shown_by="the settings of this parameter differ: it is in another group, or its group has other values",
    bug="learning-rates-collapse",
)
def find_other_settings(e: Evidence) -> Cause | None:
    """Find other settings of the candidate's optimizer for this parameter."""
    if e.comparison.id.kind is not Kind.UPDATE:
        return None
    name = e.comparison.id.name
    words = _name_different_settings(e.reference_trace, e.candidate_trace, name)
    return (
        Cause(CauseName.OPTIMIZER_SETTINGS, f"the optimizer's settings differ for {name}: {words}") if words else None
    )


def _name_different_settings(reference: Trace, candidate: Trace, parameter: str) -> str:
    """Say how a parameter's settings differ; empty if they do not, or a side has none for it."""
    ours, theirs = (trace.settings.get(parameter, ()) for trace in (reference, candidate))
    keys = dict.fromkeys(key for settings in ours for key in settings if any(key in other for other in theirs))
    pairs = ((key, _join_values(theirs, key), _join_values(ours, key)) for key in keys)
    return ", ".join(f"{key} {found} instead of {needed}" for key, found, needed in pairs if found != needed)


def _join_values(groups: Iterable[Settings], key: str) -> str:
    return " and ".join(sorted({settings[key] for settings in groups if key in settings}))


@cause(
    CauseName.UPDATED_TWICE,
    after="find_other_settings",
    shown_by="the update is twice the reference's, or that of two steps",
    fault="in two groups",
)
def find_updated_twice(e: Evidence) -> Cause | None:
    """Find an update that is twice the reference's, or that of two of its steps."""
    if e.comparison.id.kind is not Kind.UPDATE or e.comparison.verdict is not Verdict.FAIL or e.stats.aa == 0.0:
        return None
    s = e.stats
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if math.isclose(s.scale, 2.0, rel_tol=0.01) and rest <= min(MOST_TOLERANCES * e.tolerance * 2, MOST_OF_ERROR):
        return Cause(
            CauseName.UPDATED_TWICE,
            f"the update is {s.scale:.4g} x the reference's, whose gradient is the same: updated twice",
            evidence=(f"without that factor the error is {rest:.1e}",),
        )
    error = _measure_two_steps(e)
    if error <= min(MOST_TOLERANCES * e.tolerance, MOST_OF_ERROR * s.error):
        return Cause(
            CauseName.UPDATED_TWICE,
            "the update is that of two steps of the reference: updated twice",
            evidence=(f"against the reference after the next step the error is {error:.1e}",),
        )
    return None


def _measure_two_steps(e: Evidence) -> float:
    """How far the candidate after this step is from the reference after the next, relative to the update."""
    after = e.comparison.id.at(Kind.PARAM_AFTER)
    ours = LogicalTensor.of(e.reference_trace, after._replace(step=after.step + 1))
    theirs = LogicalTensor.of(e.candidate_trace, after)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return math.inf
    return math.sqrt(measure(ours, theirs)[0].dd / e.stats.aa)


@cause(
    CauseName.STEP_COUNT,
    after="find_backward_left_out",
    shown_by="the optimizer counts other steps than the reference's does",
    bug="optimizer-state-stepped-before",
)
def find_other_step_count(e: Evidence) -> Cause | None:
    """Find another step count than the reference's: the bias correction is that of another step."""
    if e.comparison.id.kind not in (Kind.UPDATE, Kind.OPTIM):
        return None
    count = e.comparison.id.at(Kind.OPTIM, slot=STEP)
    ours, theirs = (LogicalTensor.of(trace, count) for trace in (e.reference_trace, e.candidate_trace))
    if ours is None or theirs is None or bool((ours.tensor() == theirs.tensor()).all()):
        return None
    steps = [f"{float(found.tensor().flatten()[0]):g}" for found in (theirs, ours)]
    return Cause(
        CauseName.STEP_COUNT, f"the optimizer believes that this is step {steps[0]}, and the reference's {steps[1]}"
    )


@cause(
    CauseName.CLIP_FACTOR,
    after="find_clip_factor",
    shown_by="an update is wrong, and only one side clips gradients",
    unproven="no entry clips on one side; tests/judge/causes/test_optimizer.py",
)
def find_clipping_on_one_side(e: Evidence) -> Cause | None:
    """Find clipping that changes the gradients of only one side, in a step that both have trained."""
    is_of_step = e.comparison.id.kind in (Kind.UPDATE, Kind.OPTIM)
    if not is_of_step or e.comparison.id.step < e.candidate_trace.manifest.first_step:
        return None
    clip = TensorId.of(e.comparison.id.step, None, ROOT, Kind.CLIP)
    factors = {
        side: LogicalTensor.of(trace, clip)
        for side, trace in (("candidate", e.candidate_trace), ("reference", e.reference_trace))
    }
    clipping = {side: float(factor.tensor()) for side, factor in factors.items() if factor is not None}
    if len(clipping) != 1:
        return None
    [(side, factor)] = clipping.items()
    words = f"only the {side} clips gradients: it multiplies them by {factor:.4g}"
    return Cause(CauseName.CLIP_FACTOR, words) if factor != 1.0 else None


@cause(
    CauseName.TIED_COPIES,
    after="find_wrong_ranks",
    shown_by="copies of one weight under its several names differ",
    bug="zero-tied-embeddings",
)
def find_tied_copies(e: Evidence) -> Cause | None:
    """Find copies of one tied weight, under several names, that differ."""
    name = e.comparison.id.name
    others = [alias for alias, first in e.reference_trace.aliases.items() if first == name]
    if e.comparison.verdict is not Verdict.CONFLICT or not e.comparison.id.kind.is_of_param:
        return None
    copies: dict[str, list[Shard]] = {}
    for piece in e.candidate.pieces:
        for shard in piece.summands[0]:
            copies.setdefault(_find_name_there(shard, [name, *others], e.candidate_trace), []).append(shard)
    if len(copies) < 2 or "" in copies:
        return None
    named = " and ".join(f"{copy} (rank {_list_ranks(shards)})" for copy, shards in copies.items())
    return Cause(
        CauseName.TIED_COPIES,
        f"tied copies of one weight diverged: {named}",
        evidence=(f"replicas differ by {e.comparison.replica_error:.1e}",),
    )


def _find_name_there(shard: Shard, names: list[str], candidate: Trace) -> str:
    """Under which of a tied weight's names a rank has it; empty where it has it under several."""
    modules = next(r.manifest.modules for r in candidate.ranks if r.manifest.rank == shard.coord.rank)
    found = [name for name in names if name.rpartition(".")[0] in modules]
    if not found:
        return "a copy in another module"
    return found[0] if len(found) == 1 else ""


def _list_ranks(shards: list[Shard]) -> str:
    return ", ".join(str(rank) for rank in sorted({shard.coord.rank for shard in shards}))


def _is_zero(shard: Shard) -> bool:
    found = measure_shards(shard, shard)
    return found.aa == 0.0 and found.finite_a


def _take_alone(candidate: LogicalTensor, piece: Piece, shard: Shard) -> LogicalTensor:
    return replace(candidate, pieces=(Piece(piece.region, ((shard,),)),))
