"""Causes in parameters and the optimizer's step: not loaded, not updated, updated twice, clipped, or diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Evidence, cause
from ttrace.judge.reason import DifferentSetting
from ttrace.judge.tensors.logical import LogicalTensor, Piece, measure, measure_shards
from ttrace.judge.verdict import Cause, CauseName, Verdict
from ttrace.layouts.ids import ROOT, STEP, Kind, TensorId
from ttrace.trace.format import INITIAL_RATE, NEXT_RATE
from ttrace.trace.reader import Settings, Shard, Trace

_NEEDED = {"dampening": "momentum", "nesterov": "momentum", "decoupled_weight_decay": "weight_decay"}
"""Settings that decide nothing if another one is 0."""
_ROUNDING = 2e-5
"""Settings are recorded with six digits, and a learning rate may be a float32 tensor on one side."""
_TINY = 1e-15
"""A schedule that ends at 0 may end beside it."""


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
    settings = find_different_settings(evidence.reference_trace, evidence.candidate_trace, name)
    return describe_settings([name], settings) if settings else None


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


def describe_settings(parameters: Sequence[str], settings: Iterable[DifferentSetting]) -> Cause:
    """Make the cause that these settings differ for some parameters."""
    names = parameters[0] if len(parameters) == 1 else f"{len(parameters)} parameters"
    words = ", ".join(map(str, settings))
    return Cause(CauseName.OPTIMIZER_SETTINGS, f"the optimizer's settings differ for {names}: {words}")


def find_different_settings(reference: Trace, candidate: Trace, parameter: str) -> tuple[DifferentSetting, ...]:
    """Find how a parameter's settings in the last step differ; only settings that both sides have are compared."""
    ends = {trace.ranks[0].end.num_steps for trace in (reference, candidate) if trace.ranks[0].end}
    ours, theirs = (trace.settings.get(parameter, ()) for trace in (reference, candidate))
    if len(ends) > 1:
        return ()  # their schedules are at different steps
    keys = dict.fromkeys(key for settings in ours for key in settings if key not in (INITIAL_RATE, NEXT_RATE))
    found = (compare_values(key, _list_values(ours, key), _list_values(theirs, key)) for key in keys)
    return tuple(each for each in found if each is not None and _matters(each.name, (*ours, *theirs)))


def compare_values(name: str, ours: Set[str], theirs: Set[str]) -> DifferentSetting | None:
    """Compare the values of a setting on all ranks of each side; None if they agree, or if a side has none."""
    if not ours or not theirs:
        return None
    if all(any(_is_same(a, b) for b in theirs) for a in ours) and all(
        any(_is_same(a, b) for a in ours) for b in theirs
    ):
        return None
    return DifferentSetting(name, " and ".join(sorted(theirs)), " and ".join(sorted(ours)))


def _list_values(groups: Iterable[Settings], key: str) -> Set[str]:
    return {settings[key] for settings in groups if key in settings}


def _matters(key: str, groups: Iterable[Settings]) -> bool:
    """Whether a setting decides anything: what belongs to momentum or weight decay does not without them."""
    needed = _NEEDED.get(key)
    return needed is None or any(settings.get(needed, "0") != "0" for settings in groups)


def _is_same(a: str, b: str) -> bool:
    """Whether two values are equal, numbers up to rounding; lists of different lengths cannot be compared."""
    if a == b:
        return True
    ours, theirs = (text.strip("()").split(", ") for text in (a, b))
    if len(ours) != len(theirs):
        return True
    try:
        pairs = [(float(x), float(y)) for x, y in zip(ours, theirs, strict=True) if len(ours) == 1 or x != "None" != y]
    except ValueError:
        return False
    return all(math.isclose(x, y, rel_tol=_ROUNDING, abs_tol=_TINY) for x, y in pairs)


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
