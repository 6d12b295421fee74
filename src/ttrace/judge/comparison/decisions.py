"""Verdicts on discrete decisions: a choice may differ only where rounding may change the order of the scores."""

from __future__ import annotations

import torch

from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Verdict


def judge_decision(
    ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor, tolerance: float
) -> tuple[Verdict, Why | None]:
    """Judge two choices along the last dim of the reference's scores, whose relative error may be `tolerance`.

    Choices are sets: the order of equal scores means nothing. What a differing choice loses, measured by the
    reference's own scores, must lie within what rounding may do to the scores on both sides of the tie.
    """
    if ours.ndim < scores.ndim:  # an argmax
        ours, theirs = ours[..., None], theirs[..., None]
    differs = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
    if not bool(differs.any()):
        return Verdict.PASS, None
    exact = scores.to(torch.float64)
    given_away = (exact.gather(-1, ours).sum(-1) - exact.gather(-1, theirs).sum(-1)).abs()[differs]
    finite = exact[exact.isfinite()]
    allowed = 2 * tolerance * float(finite.square().mean().sqrt()) * ours.shape[-1]
    count, total = int(differs.sum()), differs.numel()
    worst = float(given_away.max())
    if worst <= allowed:
        return Verdict.PASS, Why(Reason.CHOICES_TIED, count=count, total=total)
    return Verdict.FAIL, Why(Reason.CHOICES_DIFFER, count=count, total=total, value=worst, limit=allowed)
