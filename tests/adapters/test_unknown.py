"""What no adapter can read is refused by name, and never judged."""

from __future__ import annotations

import pytest
from torch import nn

from ttrace.adapters.registry import make_adapter
from ttrace.errors import CaptureError


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # without a process group
    nn.Module.__init__(model)
    with pytest.raises(CaptureError, match=r"FSDP1 .* Use FSDP2 \(fully_shard\), which TTrace knows"):
        make_adapter(None, [nn.Sequential(model)], None, None)


def test_deepspeed_without_its_engine_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.ds_id = 0  # type: ignore[attr-defined]  # as ZeRO-3 marks them
    with pytest.raises(CaptureError, match=r"ZeRO-3 without its engine \(weight has a ds_id"):
        make_adapter(None, [model], None, None)

    zero = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    with pytest.raises(CaptureError, match=r"Give ttrace\.attach the engine"):
        make_adapter(None, [nn.Linear(4, 4)], [zero], None)
