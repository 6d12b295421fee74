"""This module says how far rounding moves the norm of all gradients, the one sum over everything that a model has.

Twins do not show it: they add up in the same order, and what their gradients differ by averages out. On a CPU torch
adds float32 numbers one after the other, so that the norm of 10^6 of them is off by 1e-5, of 10^8 by a percent, and
less if ranks have parts of them (tests/judge/tolerance/test_grad_norm.py::test_norms_of_many_numbers_are_off).
How far the reference's own is off is known: its gradients are, and they are summed in float64 here. Sums in a tree are
off by little, the more so by chance; for them there is a least.
"""

from __future__ import annotations

import math

import torch

from ttrace.judge.tolerance.estimate import unit
from ttrace.tensors.ids import MAIN_PARAM, Kind, TensorId

_LEAST = 1 / 64
"""In units of u and the root of the number of elements."""
_MOST = 1 / 200
"""In units of u and the number of elements; twice what was seen. A number that is further off is another norm."""
_FOLLOWS = {Kind.GRAD_NORM: 1.0, Kind.CLIP: 1.0, Kind.UPDATE: 1.0, Kind.OPTIM: 2.0}
"""What clipping by a norm goes into, and how often: optimizers have squares of gradients."""


def measure_norm_error(norm: float, squares: float, numel: int) -> float:
    """How far, relatively, rounding may move a norm of so many numbers, whose squares add up to `squares`."""
    u = unit(torch.float32)  # 16-bit numbers are summed in it, too
    own = abs(norm / math.sqrt(squares) - 1.0) if squares > 0.0 and math.isfinite(norm + squares) else 0.0
    return max(_LEAST * math.sqrt(numel) * u, own if own <= _MOST * numel * u else 0.0)


def find_norm_share(tensor_id: TensorId) -> float:
    """How much of the norm's error a tensor has."""
    return 0.0 if tensor_id.site.slot == MAIN_PARAM else _FOLLOWS.get(tensor_id.kind, 0.0)
