"""Causes in what a module computes: a function that only one side applies, or a part that does not count once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from ttrace.judge.causes.evidence import Evidence
from ttrace.judge.causes.registry import cause
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Cause, CauseName
from ttrace.tensors.ids import ROOT, Kind

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "logarithm of the softmax": lambda x: x.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "exponential": torch.exp,
    "hyperbolic tangent": torch.tanh,
    "ReLU": torch.relu,
    "SiLU": F.silu,
    "GELU": F.gelu,
}
"""Functions that are easily applied twice, or forgotten. The softmax is over the last dim."""


@cause(
    CauseName.FUNCTION,
    after="find_weaker_dtype",
    shown_by="one side is a function of the other: softmax, sigmoid, an activation",
    bug="transformers-router-softmaxed-twice",
)
def find_function(e: Evidence) -> Cause | None:
    """Find a function that only one side applied."""
    is_forward = not e.comparison.id.kind.is_backward and not e.comparison.id.kind.is_of_param
    pair = e.tensors if is_forward and e.reference.dtype.is_floating_point else None
    if pair is None or not pair[0].ndim:
        return None
    ours, theirs = pair
    for name, function in _FUNCTIONS.items():
        for x, y, words in (
            (ours, theirs, f"the candidate is the {name} of the reference: only the candidate applies it"),
            (theirs, ours, f"the reference is the {name} of the candidate: only the reference applies it"),
        ):
            rest = float((function(x) - y).norm() / ours.norm())
            if e.is_explained_error(rest):
                return Cause(CauseName.FUNCTION, words, evidence=(f"with it the error is {rest:.1e}",))
    return None


@cause(
    CauseName.MISCOUNTED_PART,
    after="find_bias",
    shown_by="the difference is what one module inside makes: added too often, or left out",
    bug="lora-counted-on-every-rank",
)
def find_miscounted_part(e: Evidence) -> Cause | None:
    """Find a module inside whose output, or whose gradient, is added too often or left out."""
    pair = e.tensors if e.comparison.id.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) else None
    if pair is None:
        return None
    surplus = pair[1] - pair[0]
    for name, part in _read_parts(e):
        count = round(float((surplus * part).sum() / part.square().sum().clamp_min(1e-300)))
        rest = float((surplus - count * part).norm() / pair[0].norm())
        if count and e.is_explained_error(rest):
            what = "output" if e.comparison.id.kind is Kind.OUTPUT else "gradient"
            often = "once" if count == 1 else f"{count} times"
            words = "left out" if count == -1 else f"added {often} too often" if count > 0 else f"added {count} times"
            return Cause(
                CauseName.MISCOUNTED_PART,
                f"the {what} of {name} is {words}",
                evidence=(f"apart from that the error is {rest:.1e}",),
            )
    return None


def _read_parts(e: Evidence) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the reference's tensors of the same kind and shape of the modules right inside this one."""
    own, shape = e.comparison.id, tuple(e.reference.shape)
    prefix = "" if own.name == ROOT else f"{own.name}."
    for other in e.reference_trace.shards:
        name = other.name
        is_inside = name != ROOT and name.startswith(prefix) and "." not in name.removeprefix(prefix)
        if is_inside and other == replace(own, site=replace(own.site, name=name)):
            part = LogicalTensor.of(e.reference_trace, other)
            if part is not None and tuple(part.shape) == shape:
                yield name, part.tensor().to(torch.float64)
