"""Judgements of models of any size, made without traces."""

from __future__ import annotations

import math
import random

from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import (
    Cause,
    CauseName,
    Comparison,
    Finding,
    Judgement,
    Reach,
    Tolerance,
    Untested,
    Verdict,
    Weakness,
)
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.values.stats import Stats

UNIT = 2.0**-24
MODULES = ("norm1", "attn.qkv", "attn.proj", "attn", "norm2", "mlp.fc1", "mlp.fc2", "mlp", "")
PARAMETERS = ("norm1.weight", "attn.qkv.weight", "attn.proj.weight", "norm2.weight", "mlp.fc1.weight", "mlp.fc2.weight")
FORWARD, BACKWARD = (Kind.INPUT, Kind.OUTPUT), (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)
BUG = "layers.{}.attn.proj"


def large(num_layers: int, num_microbatches: int, *, wrong_from: int | None = None) -> Judgement:
    """Make a transformer's judgement; it is wrong from the backward of layer `wrong_from` on, or nowhere."""
    draw = random.Random(0)
    made = [
        _comparison(draw, TensorId.of(0, microbatch, name, kind), _passed(layer, kind, num_layers))
        for microbatch in range(num_microbatches)
        for layer, name, kind in _activations(num_layers)
    ]
    made += [
        _comparison(draw, TensorId.of(0, None, f"layers.{layer}.{name}", kind), 1 - layer / num_layers)
        for layer in range(num_layers)
        for name in PARAMETERS
        for kind in (Kind.PARAM_GRAD, Kind.UPDATE, Kind.PARAM_AFTER)
    ]
    if wrong_from is None:
        weak = {"layers.3.attn.key.bias": Weakness.NO_GRADIENT}
        untested = (Untested.LATER_STEPS, Untested.NO_CLIPPING, Untested.IGNORED_LABELS, Untested.OWN_DATA)
        notes = ("120 of 240 layouts were inferred from shapes",)
        return Judgement(tuple(made), (), (), notes, reach=Reach(2.1e-6, weak, untested))
    made = [_broken(c) if _is_reached(c.id, wrong_from) else c for c in made]
    first = next(c for c in made if c.id.name == BUG.format(wrong_from) and c.id.kind is Kind.GRAD_INPUT)
    cause = Cause(
        CauseName.CONSTANT_FACTOR, "the candidate is 0.5 x the reference: scaled by 1/tp (tp=2)", "tp", ("exactly",)
    )
    finding = Finding(first, first.id.name, "model.py:41", cause, sum(c.verdict is Verdict.FAIL for c in made) - 1)
    return Judgement(tuple(made), (finding,), ())


def _passed(layer: int, kind: Kind, num_layers: int) -> float:
    """Return the share of the model that was computed before a tensor."""
    return layer / num_layers if kind in FORWARD else 1 - layer / num_layers


def _activations(num_layers: int) -> list[tuple[int, str, Kind]]:
    order = range(num_layers)
    forward = [(i, name, kind) for i in order for name in _modules(i) for kind in FORWARD]
    backward = [(i, name, kind) for i in reversed(order) for name in reversed(_modules(i)) for kind in BACKWARD]
    return forward + backward


def _modules(layer: int) -> list[str]:
    return [f"layers.{layer}.{name}".rstrip(".") for name in MODULES]


def _comparison(draw: random.Random, tensor_id: TensorId, depth: float) -> Comparison:
    twin_error = UNIT * (2 + 10 * math.sqrt(depth)) * draw.uniform(0.9, 1.1)
    error = twin_error * draw.uniform(0.8, 1.3)
    stats = Stats(count=4096, aa=1.0, bb=1.0, ab=1 + error / 64, dd=error**2)
    tolerance = Tolerance(4 * twin_error, twin_error, UNIT, scale=4 * twin_error / 32)
    if draw.random() < 0.002:
        return Comparison(tensor_id, Verdict.UNJUDGED, Why(Reason.ZERO))
    return Comparison(
        tensor_id,
        Verdict.PASS,
        None,
        stats,
        tolerance,
        layout="batch seq hidden/tp",
        by=Provenance(LayoutSource.RULE, "rule 3"),
    )


def _is_reached(tensor_id: TensorId, layer: int) -> bool:
    mine = int(tensor_id.name.split(".")[1])
    if tensor_id.kind in FORWARD:
        return False
    is_after = mine < layer or (mine == layer and tensor_id.name.split(".")[2:3] != ["mlp"])
    return is_after and not (mine == layer and tensor_id.kind is Kind.GRAD_OUTPUT)


def _broken(comparison: Comparison) -> Comparison:
    if comparison.tolerance is None:
        return comparison
    stats = Stats(count=4096, aa=1.0, bb=0.25, ab=0.5, dd=0.25)
    return Comparison(
        comparison.id,
        Verdict.FAIL,
        None,
        stats,
        comparison.tolerance,
        layout=comparison.layout,
        by=Provenance(LayoutSource.RULE, "rule 3"),
    )
