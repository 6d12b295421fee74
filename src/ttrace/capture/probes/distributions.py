"""Distributions that parameters and batches are generated from."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ttrace.values.generate import Distribution, Integers, Mask, Normal, Rows

_FLAT_STD = 0.02
"""The standard deviation for parameters that start as constants: zero biases and unit norm weights hide bugs."""


def measure_parameter(parameter: torch.Tensor) -> Normal:
    """Measure the mean and spread of a parameter as it was initialised."""
    data = parameter.detach().to(torch.float64)
    mean = float(data.mean()) if data.numel() else 0.0
    std = float(data.std(correction=0)) if data.numel() > 1 else 0.0
    return Normal(mean, std if std > 1e-6 * abs(mean) else _FLAT_STD)


def measure_batch(data: torch.Tensor, tables: Collection[int] = ()) -> Distribution | None:
    """Measure the distribution of a batch's tensor; None for data with a structure that random numbers would destroy.

    `tables` are the lengths of the model's embeddings. Integers whose maximum lies in the second half of a table are
    taken for rows of that table, or for labels of such rows; generated ones may then be any row of it.
    """
    if data.numel() == 0:
        return None
    if data.is_floating_point():
        return measure_parameter(data)
    if data.dtype == torch.bool:
        return Mask(float(data.to(torch.float64).mean()))
    low, high = int(data.min()), int(data.max())
    is_rising = data.ndim > 0 and data.shape[-1] > 1 and bool((data.diff(dim=-1) >= 0).all())
    if is_rising:  # positions, offsets, a constant
        return None
    num_rows = min((length for length in tables if high < length <= 2 * high), default=None)
    if low >= 0:
        return Integers(low, high + 1) if num_rows is None else Rows(num_rows)
    is_kept = data >= 0
    if not bool(is_kept.any()) or bool((data[~is_kept] != low).any()):
        return None
    share = float(is_kept.to(torch.float64).mean())
    if num_rows is not None:
        return Rows(num_rows, keep=share, hole=low)
    return Integers(int(data[is_kept].min()), high + 1, keep=share, hole=low)
