"""What the adapter refuses before it reads anything of Megatron; tests/megatron has the rest."""

from __future__ import annotations

import pytest
from torch import nn

from ttrace.adapters.megatron.adapter import Megatron
from ttrace.adapters.registry import make_adapter
from ttrace.errors import CaptureError


def test_a_mesh_is_refused_since_process_groups_state_it() -> None:
    with pytest.raises(CaptureError, match=r'attach\(mesh="dp=2 tp=4"\): .* process groups.* Leave mesh= out'):
        make_adapter(Megatron, [nn.Linear(2, 2)], None, {"dp": 2, "tp": 4})
