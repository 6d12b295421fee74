"""A parameter's own values, which generated values replace: what is recorded of them, and which ones are kept.

Nothing that is traced depends on replaced values, so a check would not see that each replica started with its own. Sums
of them are read when the session starts, and count only if no collective runs and nothing is loaded before the first
forward pass: a script may broadcast or load after `attach`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter
from ttrace.compat import torch as torch_compat
from ttrace.compat.distributed import count_collectives
from ttrace.large_references.parameter_source import find_source
from ttrace.trace.format import InitialValues
from ttrace.values.checksum import compute_checksum

_MOST_PARTS = 64
"""Two shards of a dim that is cut into more parts are not compared."""
_MOST_MEASURED = 1 << 18
"""So many elements show a standard deviation to about 0.1%."""
_NUM_SAMPLED = 4
"""How many indices of each other dim are read to find out whether parts of a dim are equal."""
_FACTORS = (math.sqrt(2.0), math.sqrt(3.0), math.sqrt(5.0))
"""With them, different samples nearly always have different sums, and equal ones equal sums."""


class InitialState:
    """The parameters' own values, from the start of a session to its first forward pass."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], adapter: Adapter, *, is_reference: bool, was_trained: bool = False
    ) -> None:
        """Read the values; with `was_trained`, an optimizer has just stepped, and may still exchange its results."""
        self._parameters = parameters
        self._was_trained = was_trained
        self._waiting = read_initial_values(parameters, adapter, is_reference=is_reference)
        self._before: tuple[int | None, dict[str, int]] = (None, {})
        self.values: dict[str, InitialValues] = {}
        """By parameter, what was what the script trains. Empty before the first forward pass."""

    def on_attached(self) -> None:
        """Remember how far the process is: values have been replaced, and the script continues."""
        self._before = (count_collectives(), self._read_versions())

    def on_start(self) -> None:
        """Forget the values if a collective has run before the first step: it may have broadcast other ones.

        The ledger shows the collectives that follow (judge/findings/initial_values.py).
        """
        if self._waiting and self._has_communicated():
            self._waiting = {}

    def on_forward(self) -> None:
        """Choose what still counts when the first forward pass begins; later calls do nothing."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            if self._was_trained and self._has_communicated():
                return
            (_, versions), now = self._before, self._read_versions()
            self.values = {name: own for name, own in waiting.items() if versions[name] == now[name]}

    def _has_communicated(self) -> bool:
        count, _ = self._before
        return count is None or count != count_collectives()

    def _read_versions(self) -> dict[str, int]:
        return {name: torch_compat.read_version(parameter) for name, parameter in self._parameters.items()}


def read_initial_values(
    parameters: Mapping[str, nn.Parameter], adapter: Adapter, *, is_reference: bool
) -> dict[str, InitialValues]:
    """Read the sums of this rank's values; nothing of values that are not there, not finite, or kept in runs."""
    found = {}
    for name, parameter in parameters.items():
        if find_source(parameter) is not None or parameter.is_meta or not parameter.is_floating_point():
            continue
        owned = adapter.read_values(parameter)
        local = adapter.to_local(owned.tensor).detach()
        if owned.run is not None or local.is_meta or not local.numel():
            continue
        local = local.cpu().contiguous()
        mean, std = _measure(local)
        if math.isfinite(mean) and math.isfinite(std):
            repeats = is_reference and std > 0.0 and may_repeat(local)
            found[name] = InitialValues(crc=compute_checksum(local), mean=mean, std=std, repeats=repeats)
    return found


def _measure(tensor: torch.Tensor) -> tuple[float, float]:
    """Measure the mean and the standard deviation, of evenly spaced elements if there are many."""
    flat = tensor.view(-1)
    data = flat[:: -(-len(flat) // _MOST_MEASURED)].to(torch.float64)
    std, mean = torch.std_mean(data, correction=0)
    return float(mean), float(std)


def may_repeat(tensor: torch.Tensor) -> bool:
    """Whether some dim may be cut into equal parts of which two hold the same values, as far as samples show."""
    return any(_may_repeat_along(tensor, dim) for dim in range(tensor.ndim))


def _may_repeat_along(tensor: torch.Tensor, dim: int) -> bool:
    size = tensor.shape[dim]
    places = tuple(slice(None) if other == dim else slice(_NUM_SAMPLED) for other in range(tensor.ndim))
    lines = tensor[places].movedim(dim, 0).reshape(size, -1).to(torch.float64)
    keys = lines[:, 0]
    for factor, line in zip(_FACTORS, lines[:, 1:].unbind(1), strict=False):
        keys = keys + factor * line
    if len(keys.unique()) == size:
        return False  # no two indices hold the same, so no two parts do
    for num_parts in range(2, min(size, _MOST_PARTS) + 1):
        if size % num_parts == 0:
            parts = lines.reshape(num_parts, -1)
            if parts.unique(dim=0).shape[0] < num_parts:
                return True
    return False
