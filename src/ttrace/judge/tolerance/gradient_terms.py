"""Sizes of the terms that a parameter's gradient is the sum of.

A gradient that is no larger than rounding of its terms is zero but for rounding. Each element of a weight's gradient is
a sum over tokens of a gradient that arrives times an input; of a bias' gradient, of the gradient that arrives alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ttrace.judge.verdict import Tolerance
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.stats import Stats


def measure_rounding_of_terms(
    tensor_id: TensorId,
    reference: Trace,
    twins: Mapping[TensorId, Sequence[Stats]],
    tolerances: Mapping[TensorId, Tolerance],
) -> float:
    """How large rounding of its terms makes an element of this gradient; 0 where the terms were not recorded."""
    if tensor_id.kind not in (Kind.PARAM_GRAD, Kind.MAIN_GRAD):
        return 0.0
    module = tensor_id.name.rpartition(".")[0] or ROOT
    known = [t for t in tolerances if t.name == module and t.step == tensor_id.step and _is_of(tensor_id, t)]
    arriving = [t for t in known if t.kind is Kind.GRAD_OUTPUT and twins[t]]
    inputs = [twins[t][0] for t in known if t.kind is Kind.INPUT and twins[t] and tolerances[t].floor > 0.0]
    has_input = len(reference.shards[tensor_id][0].record.shape) > 1
    squares = sum(twins[t][0].aa / max(_width(t, reference), 1) for t in arriving)
    if has_input:
        squares *= max((s.aa / s.count for s in inputs if s.count), default=0.0)
    rounding = max((max(tolerances[t].twin_error, tolerances[t].floor) for t in arriving), default=0.0)
    return math.sqrt(squares) * rounding


def _is_of(gradient: TensorId, other: TensorId) -> bool:
    return gradient.microbatch is None or other.microbatch == gradient.microbatch


def _width(tensor_id: TensorId, reference: Trace) -> int:
    """How many features each token has."""
    shape = reference.shards[tensor_id][0].record.shape
    return shape[-1] if shape else 1
