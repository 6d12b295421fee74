"""This module says what TTrace must know of a framework."""

from __future__ import annotations

from typing import Protocol

import torch

from ttrace.layouts.placed import Placed
from ttrace.tensors.mesh import Coord, Mesh


class Adapter(Protocol):
    """Where this rank sits, what a live tensor says of its own layout, and how to reach its local values."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def coord(self) -> Coord: ...

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """The layout that the tensor itself states, or None."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's values as a plain tensor."""
