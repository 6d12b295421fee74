"""Private APIs of Megatron-core, all in one place.

Each entry says in which versions it was seen and what happens without it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def read_owned_range(distributed_optimizer: Any, parameter: nn.Parameter) -> tuple[int, int]:
    """Read the run of a parameter's flattened values that this rank's distributed optimizer owns.

    `DistributedOptimizer._get_model_param_range_map`, in all versions that the tests run (zoo/harness/megatron).
    Without it gradients and states of the distributed optimizer cannot be recorded.
    """
    owned = distributed_optimizer._get_model_param_range_map(parameter)["param"]
    return owned.start, owned.end
