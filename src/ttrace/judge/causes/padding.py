"""Cause: a vocabulary that is padded on one side only, and whose padding takes part in the softmax."""

from __future__ import annotations

import math

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, Evidence
from ttrace.judge.causes.registry import FIRST, cause
from ttrace.judge.tensors.factor import factor_to_come
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import ROOT, Kind, Site, TensorId
from ttrace.trace.reader import Trace

_MOST = 1 << 26
"""Logits of more elements are not read."""


@cause(
    CauseName.PADDED_VOCABULARY,
    after=FIRST,
    shown_by="logits agree, and their gradients are those of a softmax over the padded words too",
    unproven="it needs two implementations; tests/ports/test_ports.py",
)
def find_padded_vocabulary(evidence: Evidence) -> Cause | None:
    """Whether the loss is one over more words: it has no logits for them in the reference."""
    tensor_id = evidence.comparison.id
    if tensor_id.site != Site(ROOT, Kind.LOSS):
        return None
    for name, count in evidence.candidate_trace.manifest.padding.items():
        if any(_is_softmax_over_more(evidence, each, count) for each in _find_outputs(evidence, tensor_id, name)):
            return Cause(
                CauseName.PADDED_VOCABULARY,
                f"the softmax of the loss is taken over {count} padded words too, which the reference does not have: "
                "leave them out of the loss",
                evidence=(f"{name} has {count} rows of padding",),
            )
    return None


def _find_outputs(evidence: Evidence, tensor_id: TensorId, parameter: str) -> list[TensorId]:
    """Find the outputs of the module whose parameter is padded, in the microbatch of the loss."""
    module = parameter.rpartition(".")[0]
    where = tensor_id.step, tensor_id.microbatch, module, Kind.OUTPUT
    return [t for t in evidence.reference_trace.shards if (t.step, t.microbatch, t.name, t.kind) == where]


def _is_softmax_over_more(evidence: Evidence, output: TensorId, count: int) -> bool:
    """Whether the gradients of logits show that there are so many more, which are zero as their weights are."""
    ours, theirs = (
        _read(trace, output.at(Kind.GRAD_OUTPUT)) for trace in (evidence.reference_trace, evidence.candidate_trace)
    )
    logits = _read(evidence.reference_trace, output)
    if logits is None or ours is None or theirs is None:
        return False
    chances = logits.softmax(-1)
    # A gradient is the chance times the token's weight in the loss, for all words but the label.
    weight = (ours / chances).median(-1, keepdim=True).values
    change = weight * chances * (count / (logits.exp().sum(-1, keepdim=True) + count))
    factor = factor_to_come(output.at(Kind.GRAD_OUTPUT), evidence.reference_trace, evidence.candidate_trace)
    rest = theirs * factor - (ours - change)
    return float(rest.norm()) <= MOST_OF_ERROR * float(change.norm())


def _read(trace: Trace, tensor_id: TensorId) -> torch.Tensor | None:
    logical = LogicalTensor.of(trace, tensor_id)
    if logical is None or math.prod(logical.shape) > _MOST:
        return None
    return logical.tensor().to(torch.float64)
