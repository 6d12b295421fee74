"""Distributions that parameters and batches are generated from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

from ttrace.trace.storage.pinned_chunks import is_asynchronous
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Rows

_FLAT_STD = 0.02
"""The standard deviation for parameters that start as constants: zero biases and unit norm weights hide bugs."""


def read_numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Read tensors of one element each, and wait once for each device that they are on."""
    numbers = list(tensors)
    values = [0.0] * len(numbers)
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    for here in places.values():
        for place, value in zip(here, _stack(numbers[place] for place in here).tolist(), strict=True):
            values[place] = value
    return values


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host, and wait once for each device that they are on."""
    copies = [tensor.detach().to("cpu", non_blocking=is_asynchronous(tensor)) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if is_asynchronous(tensor)}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def measure_parameters(parameters: Iterable[torch.Tensor]) -> list[Normal]:
    """Measure the mean and spread of each parameter as it was initialised."""
    numbers = read_numbers(number for parameter in parameters for number in _compute_moments(parameter))
    return [_make_normal(mean, std) for mean, std in zip(numbers[::2], numbers[1::2], strict=True)]


def _make_normal(mean: float, std: float) -> Normal:
    if not math.isfinite(mean) or not math.isfinite(std):  # memory that nobody initialised, or masks of -inf
        return Normal(0.0, _FLAT_STD)
    return Normal(mean, std if std > 1e-6 * abs(mean) else _FLAT_STD)


def pool_normals(parts: Sequence[tuple[int, Normal]]) -> Normal:
    """Return the mean and spread of several tensors together, each given with its number of elements."""
    if len(parts) == 1:
        return parts[0][1]
    count = sum(number for number, _ in parts)
    mean = sum(number * own.mean for number, own in parts) / count
    square = sum(number * (own.std**2 + own.mean**2) for number, own in parts) / count
    return Normal(mean, math.sqrt(max(square - mean**2, 0.0)))


def _compute_moments(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data = parameter.detach().to(torch.float64)
    zero = torch.zeros((), dtype=torch.float64, device=data.device)
    return data.mean() if data.numel() else zero, data.std(correction=0) if data.numel() > 1 else zero


def _stack(numbers: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([number.detach().reshape(()).to(torch.float64) for number in numbers])


def measure_batch(data: torch.Tensor, tables: Collection[int] = ()) -> Distribution | None:
    """Measure the distribution of a batch's tensor on the host.

    None for data with a structure that random numbers would destroy. `tables` are the lengths of the model's
    embeddings. Integers whose maximum lies in the second half of a table are taken for rows of that table, or for
    labels of such rows; generated ones may then be any row of it.
    """
    if data.numel() == 0:
        return None
    if data.is_floating_point():
        return measure_parameters([data])[0] if bool(data.isfinite().all()) else None
    if data.dtype == torch.bool:
        return Mask(float(data.to(torch.float64).mean()))
    low, high = int(data.min()), int(data.max())
    if data.ndim > 0 and data.shape[-1] > 1 and _is_counted(data):
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


def _is_counted(data: torch.Tensor) -> bool:
    """Whether rows rise, as positions, offsets and constants do; or count from 0 for each of several documents."""
    rises = data.diff(dim=-1)
    is_counted = bool(((rises == 1) | (data[..., 1:] == 0)).all()) and int(data.max()) > 1
    return is_counted or bool((rises >= 0).all())
