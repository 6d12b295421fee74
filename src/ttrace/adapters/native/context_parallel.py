"""Split of a sequence by torch's context_parallel: along which axis, and in which order."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ttrace.adapters.native.layouts import read_axis_names
from ttrace.errors import LayoutError
from ttrace.layouts.layout import Cut
from ttrace.layouts.splits import BLOCK, Split
from ttrace.tensors import ranges as rg

_KNOWN = (BLOCK, Split("zigzag"))


def find_cut(mesh: DeviceMesh, size: int, held: torch.Tensor) -> Cut:
    """Find the axis of a one-dimensional mesh, and the split that gives this rank these indices in every sample.

    `held` has a row of indices per sample. The split is found from the result and not from the load balancer, because
    load balancers are private.
    """
    axis = read_axis_names(mesh)[0]
    first = rg.from_indices(held[0])
    for split in _KNOWN:
        if bool((held == held[0]).all()) and split.ranges(size, mesh.get_local_rank(), mesh.size()) == first:
            return Cut(axis, split)
    raise LayoutError(
        f"context_parallel splits {size} tokens over {axis}={mesh.size()} in an order that is no known split: this "
        f"rank holds {first[:4]}. Write it as a @ttrace.split, and rules that name it."
    )
