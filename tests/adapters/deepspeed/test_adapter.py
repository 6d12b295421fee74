"""DeepSpeed's engine on two ranks: recording changes no bit, leaves nothing behind, and misses no part of a parameter.

That a clean engine agrees with plain PyTorch, and that bugs are found, is tested by the rows of `zoo/frameworks`.
"""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.adapters.deepspeed.compat import read_partition
from ttrace.capture.plan import Plan
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_MICROBATCHES = 2, 2


@dataclass(frozen=True)
class Engine:
    """How an engine is set up."""

    stage: int
    is_bf16: bool = False
    persistent: int = 0
    """The size up to which ZeRO-3 keeps parameters whole."""


CASES = [
    *(Engine(stage, is_bf16) for stage in range(4) for is_bf16 in (False, True)),
    Engine(3, persistent=1000),
]


class Net(nn.Module):
    """Parameters of odd sizes, one element, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean() * self.frozen.sum()  # type: ignore[no-any-return]


def make_engine(case: Engine) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(torch.distributed.get_rank())}
    deepspeed: Any = importlib.import_module("deepspeed")
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None  # it would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": case.persistent},
        "bf16": {"enabled": case.is_bf16},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(case: Engine, plan: Plan | None) -> tuple[list[torch.Tensor], list[str]]:
    """Return what this rank has of all parameters after some steps, and what is patched then."""
    from ttrace.capture.parts import Declarations
    from ttrace.capture.start import start_session

    engine = make_engine(case)
    before = [set(vars(engine)), set(vars(engine.optimizer))]
    if plan is not None:
        plan.save(plan.out.with_suffix(f".{torch.distributed.get_rank()}.json"))
    address = None if plan is None else str(plan.out.with_suffix(f".{torch.distributed.get_rank()}.json"))
    session = None if address is None else start_session(engine, None, Declarations(), address=address)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(NUM_STEPS):
        with session.step() if session else nullcontext():
            for _ in range(NUM_MICROBATCHES):
                x = torch.randn(4, 7).to(next(engine.parameters()).dtype)
                engine.backward(engine(x))
                engine.step()
    if session:
        session.close()
    after = [set(vars(engine)), set(vars(engine.optimizer))]
    left = [
        name for old, new in zip(before, after, strict=True) for name in new - old if "step" in name or "clip" in name
    ]
    values = [
        (read_partition(each)[0] if case.stage == 3 else each).detach().clone() for each in engine.module.parameters()
    ]
    engine.destroy()
    return values, left


def compare(folder: Path) -> list[tuple[int, list[str]]]:
    """For each case, how many parameters differ if they are recorded, and what is left behind."""
    found = []
    for number, case in enumerate(CASES):
        plan = Plan(out=folder / str(number), parameters="own", num_steps=NUM_STEPS, stop=False)
        (bare, _), (traced, left) = train(case, None), train(case, plan)
        found.append((sum(not torch.equal(a, b) for a, b in zip(bare, traced, strict=True)), left))
    return found


def test_engines_are_recorded_completely_and_train_as_before(tmp_path: Path) -> None:
    for found in on_ranks(2, compare, tmp_path):
        assert dict(zip(CASES, found, strict=True)) == {case: (0, []) for case in CASES}
    for number, case in enumerate(CASES):
        trace = Trace(tmp_path / str(number))
        trained = {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
        for kind in (Kind.PARAM_GRAD, Kind.OPTIM, Kind.PARAM_AFTER):
            recorded = {t.name for t in trace.shards if t.kind is kind and t.microbatch is None and t.step == 1}
            assert recorded - {"frozen"} == trained, (case, kind)
        assert {str(t) for t in trace.shards if t.kind in (Kind.GRAD_NORM, Kind.CLIP)} == {
            f"{step}/-/./{kind}" for step in range(NUM_STEPS) for kind in ("grad_norm", "clip")
        }
        for tensor_id, shards in trace.shards.items():
            region = shards[0].record.region
            assert region is not None, (case, tensor_id)
            covered = torch.zeros(region.shape)
            for shard in shards:
                assert shard.record.region is not None
                shard.record.region.put(torch.ones(shard.record.region.local_shape), covered)
            assert covered.all(), (case, tensor_id)
