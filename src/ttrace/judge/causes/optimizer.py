"""Causes in parameters and the optimizer's step: not loaded, not updated, updated twice, clipped, or diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence, cause
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure, measure_shards
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, STEP, Kind, TensorId
from ttrace.trace.reader import Settings, Shard, Trace


@cause(
    CauseName.NOT_LOADED,
    kinds=(Kind.PARAM, Kind.BUFFER),
    shown_by="the checkpoint changed others, and this parameter or buffer still holds what it was initialised with",
    unproven="entries of the zoo are loaded from older values; tests/workflow/test_resume.py",
)
def find_not_loaded(evidence: Evidence) -> Cause | None:
    """Find a parameter or buffer that a checkpoint should have replaced."""
    if evidence.comparison.id.name not in evidence.candidate_trace.unloaded:
        return None
    words = "not loaded: the checkpoint changed others, and this one is as it was initialised"
    return Cause(CauseName.NOT_LOADED, words)


@cause(
    CauseName.NOT_UPDATED,
    kinds=(Kind.UPDATE,),
    shown_by="an update that is zero, everywhere or on some ranks",
    bug="left-out-of-optimizer",
)
def find_not_updated(evidence: Evidence) -> Cause | None:
    """Find a parameter that did not change: everywhere, or on some ranks while the others have the right update."""
    if evidence.stats.aa == 0.0:
        return None
    if evidence.comparison.verdict is Verdict.FAIL and evidence.stats.bb == 0.0:
        return Cause(CauseName.NOT_UPDATED, "the optimizer left this parameter as it was")
    shards = [(piece, shard) for piece in evidence.candidate.pieces for shard in piece.summands[0]]
    stale = [shard for _, shard in shards if _is_zero(shard)]
    rest = [pair for pair in shards if pair[1] not in stale]
    if not stale or not rest or evidence.candidate.pending:
        return None
    error = max(evidence.error_of(_take_alone(evidence.candidate, piece, shard)) for piece, shard in rest)
    if error > evidence.tolerance:
        return None
    ranks = sorted({shard.coord.rank for shard in stale})
    return Cause(
        CauseName.NOT_UPDATED,
        f"rank {', '.join(map(str, ranks))} left this parameter as it was: the update never arrived there",
        evidence=(f"the update of all other ranks is the reference's to {error:.1e}",),
    )


@cause(
    CauseName.OPTIMIZER_SETTINGS,
    kinds=(Kind.UPDATE,),
    shown_by="the settings of this parameter differ: it is in another group, or its group has other values",
    bug="learning-rates-collapse",
)
def find_other_settings(evidence: Evidence) -> Cause | None:
    """Find other settings of the candidate's optimizer for this parameter."""
    name = evidence.comparison.id.name
    words = _name_different_settings(evidence.reference_trace, evidence.candidate_trace, name)
    sentence = f"the optimizer's settings differ for {name}: {words}"
    return Cause(CauseName.OPTIMIZER_SETTINGS, sentence) if words else None


@cause(
    CauseName.UPDATED_TWICE,
    verdict=Verdict.FAIL,
    kinds=(Kind.UPDATE,),
    shown_by="the update is twice the reference's, or that of two steps",
    bug="in-two-groups",
)
def find_updated_twice(evidence: Evidence) -> Cause | None:
    """Find an update that is twice the reference's, or that of two of its steps."""
    s = evidence.stats
    if s.aa == 0.0:
        return None
    rest = math.sqrt(max(s.bb - s.ab * s.ab / s.aa, 0.0) / s.aa)
    if math.isclose(s.scale, 2.0, rel_tol=0.01) and rest <= min(
        MOST_TOLERANCES * evidence.tolerance * 2, MOST_OF_ERROR
    ):
        return Cause(
            CauseName.UPDATED_TWICE,
            f"the update is {s.scale:.4g} x the reference's, whose gradient is the same: updated twice",
            evidence=(f"without that factor the error is {rest:.1e}",),
        )
    error = _measure_two_steps(evidence)
    if evidence.is_explained_error(error):
        return Cause(
            CauseName.UPDATED_TWICE,
            "the update is that of two steps of the reference: updated twice",
            evidence=(f"against the reference after the next step the error is {error:.1e}",),
        )
    return None


@cause(
    CauseName.STEP_COUNT,
    kinds=(Kind.UPDATE, Kind.OPTIM),
    shown_by="the optimizer is at a different step than the reference's",
    bug="optimizer-state-stepped-before",
)
def find_other_step_count(evidence: Evidence) -> Cause | None:
    """Find a different step count than the reference's: the bias correction is then that of another step."""
    count = evidence.comparison.id.at(Kind.OPTIM, slot=STEP)
    ours, theirs = (LogicalTensor.of(trace, count) for trace in (evidence.reference_trace, evidence.candidate_trace))
    if ours is None or theirs is None or bool((ours.tensor() == theirs.tensor()).all()):
        return None
    steps = [f"{float(found.tensor().flatten()[0]):g}" for found in (theirs, ours)]
    return Cause(
        CauseName.STEP_COUNT, f"the optimizer counts this as step {steps[0]}, the reference's as step {steps[1]}"
    )


@cause(
    CauseName.CLIP_FACTOR,
    kinds=(Kind.UPDATE, Kind.OPTIM),
    shown_by="an update is wrong, and only one side clips gradients",
    unproven="no entry clips on one side; tests/judge/causes/test_optimizer.py",
)
def find_clipping_on_one_side(evidence: Evidence) -> Cause | None:
    """Find clipping that changes the gradients of only one side, in a step that both have trained."""
    if evidence.comparison.id.step < evidence.candidate_trace.manifest.first_step:
        return None
    clip = TensorId.of(evidence.comparison.id.step, None, ROOT, Kind.CLIP)
    factors = {
        side: LogicalTensor.of(trace, clip)
        for side, trace in (("candidate", evidence.candidate_trace), ("reference", evidence.reference_trace))
    }
    clipping = {side: float(factor.tensor()) for side, factor in factors.items() if factor is not None}
    if len(clipping) != 1:
        return None
    [(side, factor)] = clipping.items()
    words = f"only the {side} clips gradients: it multiplies them by {factor:.4g}"
    return Cause(CauseName.CLIP_FACTOR, words) if factor != 1.0 else None


@cause(
    CauseName.TIED_COPIES,
    verdict=Verdict.CONFLICT,
    shown_by="copies of one weight under its several names differ",
    bug="zero-tied-embeddings",
)
def find_tied_copies(evidence: Evidence) -> Cause | None:
    """Find copies of one tied weight, under several names, that differ."""
    name = evidence.comparison.id.name
    others = [alias for alias, first in evidence.reference_trace.aliases.items() if first == name]
    if not evidence.comparison.id.kind.is_of_param:
        return None
    copies: dict[str, list[Shard]] = {}
    for piece in evidence.candidate.pieces:
        for shard in piece.summands[0]:
            copies.setdefault(_find_name_there(shard, [name, *others], evidence.candidate_trace), []).append(shard)
    if len(copies) < 2 or "" in copies:
        return None
    named = " and ".join(f"{copy} (rank {_list_ranks(shards)})" for copy, shards in copies.items())
    return Cause(
        CauseName.TIED_COPIES,
        f"tied copies of one weight diverged: {named}",
        evidence=(f"replicas differ by {evidence.comparison.replica_error:.1e}",),
    )


def _name_different_settings(reference: Trace, candidate: Trace, parameter: str) -> str:
    """Describe how a parameter's settings differ; empty if they do not, or if a side has no settings for it."""
    ours, theirs = (trace.settings.get(parameter, ()) for trace in (reference, candidate))
    keys = dict.fromkeys(key for settings in ours for key in settings if any(key in other for other in theirs))
    pairs = ((key, _join_values(theirs, key), _join_values(ours, key)) for key in keys)
    return ", ".join(f"{key} {found} instead of {needed}" for key, found, needed in pairs if found != needed)


def _join_values(groups: Iterable[Settings], key: str) -> str:
    return " and ".join(sorted({settings[key] for settings in groups if key in settings}))


def _measure_two_steps(evidence: Evidence) -> float:
    """Measure the candidate after this step against the reference after the next, relative to the update."""
    after = evidence.comparison.id.at(Kind.PARAM_AFTER)
    ours = LogicalTensor.of(evidence.reference_trace, after._replace(step=after.step + 1))
    theirs = LogicalTensor.of(evidence.candidate_trace, after)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return math.inf
    return math.sqrt(measure(ours, theirs)[0].dd / evidence.stats.aa)


def _find_name_there(shard: Shard, names: list[str], candidate: Trace) -> str:
    """Find the name under which a rank has a tied weight; empty if it has the weight under several."""
    modules = next(r.manifest.modules for r in candidate.ranks if r.manifest.rank == shard.coord.rank)
    present = [name for name in names if name.rpartition(".")[0] in modules]
    if not present:
        return "a copy in another module"
    return present[0] if len(present) == 1 else ""


def _list_ranks(shards: list[Shard]) -> str:
    return ", ".join(str(rank) for rank in sorted({shard.coord.rank for shard in shards}))


def _is_zero(shard: Shard) -> bool:
    stats = measure_shards(shard, shard)
    return stats.aa == 0.0 and stats.finite_a


def _take_alone(candidate: LogicalTensor, piece: Piece, shard: Shard) -> LogicalTensor:
    return replace(candidate, pieces=(Piece(piece.region, ((shard,),)),))
