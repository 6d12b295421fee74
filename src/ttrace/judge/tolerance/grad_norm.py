"""Rounding of the norm of all gradients, the one sum over everything that a model has.

Twins do not show it: they add up in the same order, and the differences of their gradients average out. On a CPU torch
adds float32 numbers one after the other, so the norm of 10^6 of them has an error of 1e-5, that of 10^8 one of a
percent, and less if ranks have parts of them
(tests/judge/tolerance/test_grad_norm.py::test_norms_of_many_numbers_are_off). The error of the reference's own norm is
known: its gradients are recorded, and are summed in float64 here. A sum in a tree has a small error, which varies by
chance; for such sums there is a minimum.
"""

from __future__ import annotations

import math

import torch

from ttrace.judge.tolerance.twins import unit
from ttrace.layouts.ids import MAIN_PARAM, Kind, TensorId

_LEAST = 1 / 64
"""In units of u and the root of the number of elements."""
_MOST = 1 / 200
"""In units of u and the number of elements; twice what was seen. A number that is further off is another norm."""
_FOLLOWS = {Kind.GRAD_NORM: 1.0, Kind.CLIP: 1.0, Kind.UPDATE: 1.0, Kind.OPTIM: 2.0}
"""What clipping by a norm goes into, and how often: optimizers have squares of gradients."""


def measure_norm_error(norm: float, squares: float, numel: int) -> float:
    """Estimate the relative error that rounding may give a norm of `numel` numbers with this sum of squares."""
    u = unit(torch.float32)  # 16-bit numbers are summed in it, too
    own = abs(norm / math.sqrt(squares) - 1.0) if squares > 0.0 and math.isfinite(norm + squares) else 0.0
    return max(_LEAST * math.sqrt(numel) * u, own if own <= _MOST * numel * u else 0.0)


def find_norm_share(tensor_id: TensorId) -> float:
    """Find how much of the norm's error a tensor has."""
    return 0.0 if tensor_id.site.slot == MAIN_PARAM else _FOLLOWS.get(tensor_id.kind, 0.0)
