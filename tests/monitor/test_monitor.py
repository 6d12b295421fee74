"""A monitor names what differs between ranks that must be equal, and says nothing of a right run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ttrace
from ttrace.layouts.ids import Kind
from ttrace.monitor.disagreement import Disagreement, Trouble
from ttrace.trace.reader import Trace
from zoo.harness.ranks import on_ranks

NUM_STEPS, EVERY, WIDTH = 6, 2, 8
Break = Callable[["Run", int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(4))

    scale: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        x = x + self.down(F.relu(self.up(x)))
        out: torch.Tensor = self.batch_norm(x.flatten(0, 1))
        return out


class Run:
    """A small training on this rank; `break_it` is called before each step."""

    def __init__(self, layout: str, break_it: Break) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.rank, self.layout = dist.get_rank(), layout
        self.num_ranks = dist.get_world_size()
        if layout == "ddp":
            self.model = DistributedDataParallel(self.model, broadcast_buffers=False)
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (self.num_ranks,), mesh_dim_names=("tp",))
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.model, mesh, plan)
        elif layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, self.num_ranks // 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model, mesh=mesh)
        self.optimizer: torch.optim.Optimizer
        if layout == "zero":
            self.model = DistributedDataParallel(self.model, broadcast_buffers=False)
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.break_it = break_it
        self.data_seed = 0 if layout == "tp" else self.rank

    @property
    def net(self) -> Net:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        assert isinstance(inner, Net)
        return inner

    def train(self, out: Path) -> list[Disagreement]:
        rules = {"*": "..."} if self.layout == "tp" else None
        monitor = ttrace.watch(self.model, self.optimizer, every=EVERY, out=out, rules=rules)
        for step in range(NUM_STEPS):
            drawn = torch.Generator().manual_seed(100 * step + self.data_seed)
            self.ids = torch.randint(16, (2, 4), generator=drawn)
            self.break_it(self, step)
            self.model(self.ids).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        monitor.close()
        assert monitor.num_checks == NUM_STEPS // EVERY
        return monitor.disagreements


def do_nothing(run: Run, step: int) -> None:
    pass


def flip(run: Run, step: int) -> None:
    """One bit of one weight of the last rank."""
    if step == 3 and run.rank == run.num_ranks - 1:
        weight = run.net.up.weight.detach()
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.view(torch.int32)[0, 3] ^= 1 << 12


def skip_broadcast(run: Run, step: int) -> None:
    if step == 0 and run.rank:
        with torch.no_grad():
            run.net.norm.weight.add_(0.5)


def repeat_data(run: Run, step: int) -> None:
    """A loader that gives each rank the same samples."""
    run.ids = torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(step))


def stick(run: Run, step: int) -> None:
    """A loader that gives the same batch twice."""
    if step == 3:
        drawn = torch.Generator().manual_seed(100 * (step - 1) + run.rank)
        run.ids = torch.randint(16, (2, 4), generator=drawn)


def freeze(run: Run, step: int) -> None:
    """An optimizer that has old parameters of a layer."""
    if step == 0:
        group, lost = run.optimizer.param_groups[0], run.net.down.weight
        group["params"] = [parameter for parameter in group["params"] if parameter is not lost]


def step_twice(run: Run, step: int) -> None:
    if step == 3 and run.rank == 1:
        for parameter in run.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()


def other_rate(run: Run, step: int) -> None:
    if step == 1 and run.rank == 1:
        run.optimizer.param_groups[0]["lr"] *= 2


def seed_by_rank(run: Run, step: int) -> None:
    """Random numbers of tensor-parallel ranks, as those of dropout, differ."""
    torch.manual_seed(step + run.rank)
    torch.rand(3)


def other_data(run: Run, step: int) -> None:
    run.ids = torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(10 * step + run.rank))


def change_table(run: Run, step: int) -> None:
    """A buffer that never changes is another on one rank."""
    if step == 1 and run.rank == 1:
        run.net.scale.mul_(2)


def train_all(cases: list[tuple[str, Break]], out: Path) -> list[list[Disagreement]]:
    return [Run(layout, break_it).train(out / f"{number}") for number, (layout, break_it) in enumerate(cases)]


CASES: list[tuple[str, Break, Trouble | None, str]] = [
    ("ddp", do_nothing, None, ""),
    ("tp", do_nothing, None, ""),
    ("zero", do_nothing, None, ""),
    ("ddp", flip, Trouble.REPLICAS_DIFFER, "up.weight/param"),
    ("ddp", skip_broadcast, Trouble.REPLICAS_DIFFER, "norm.weight/param"),
    ("ddp", repeat_data, Trouble.SAME_DATA, "data"),
    ("ddp", stick, Trouble.REPEATED_DATA, "data"),
    ("ddp", freeze, Trouble.FROZEN, "down.weight/param"),
    ("ddp", step_twice, Trouble.STEP_COUNT, "steps"),
    ("ddp", other_rate, Trouble.REPLICAS_DIFFER, "embed.weight/param"),
    ("ddp", change_table, Trouble.REPLICAS_DIFFER, "scale/buffer"),
    ("tp", skip_broadcast, Trouble.REPLICAS_DIFFER, "norm.weight/param"),
    ("tp", seed_by_rank, Trouble.RANDOM_STATE, "random state"),
    ("tp", other_data, Trouble.OTHER_DATA, "data"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Disagreement]]]:
    out = tmp_path_factory.mktemp("watch")
    cases = [(layout, break_it) for layout, break_it, _, _ in CASES]
    everyones = on_ranks(2, train_all, cases, out)
    assert everyones[0] == everyones[1]
    return out, everyones[0]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case[0]}-{case[1].__name__}" for case in CASES])
def test_what_differs_is_named_and_nothing_else(found: tuple[Path, list[list[Disagreement]]], number: int) -> None:
    _, _, trouble, site = CASES[number]
    first = found[1][number][0] if found[1][number] else None
    assert (first and first.trouble, first.site if first else "") == (trouble, site), found[1][number]


def test_a_flipped_bit_is_described_and_kept(found: tuple[Path, list[list[Disagreement]]]) -> None:
    [flipped] = [one for one in found[1][3] if one.site == "up.weight/param"]
    assert (flipped.step, flipped.ranks, flipped.majority, flipped.axis) == (4, (0, 1), (), "dp")
    assert "1 of 128 elements differ" in flipped.detail
    assert "[0, 3]" in flipped.detail
    wrong, right = (torch.load(path) for path in flipped.evidence)
    assert int((wrong != right).sum()) == 1
    assert "no value has a majority" in str(flipped)


def test_steps_taken_more_often_on_one_rank_are_counted(found: tuple[Path, list[list[Disagreement]]]) -> None:
    [counted] = [one for one in found[1][8] if one.trouble is Trouble.STEP_COUNT]
    assert "rank 0 5, rank 1 6" in counted.detail


def test_of_four_ranks_the_majority_is_right(tmp_path: Path) -> None:
    clean, wrong = on_ranks(4, train_all, [("hsdp", do_nothing), ("hsdp", flip)], tmp_path)[0]
    assert clean == []
    assert (wrong[0].site, wrong[0].ranks, wrong[0].axis) == ("up.weight/param", (1, 3), "replicate")


def train_with(layout: str, out: Path, **settings: Any) -> list[str]:
    """Train a run with a flip under other settings of the watch; return what was told."""
    run, told = Run(layout, flip), []
    monitor = ttrace.watch(run.model, run.optimizer, every=1, out=out, **settings)
    try:
        for step in range(NUM_STEPS):
            run.ids = torch.randint(16, (2, 4), generator=torch.Generator().manual_seed(100 * step + run.rank))
            flip(run, step)
            run.model(run.ids).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    except ttrace.DisagreementError as error:
        told.append(str(error))
    monitor.close()
    return told


def test_a_disagreement_raises_on_all_ranks_if_asked_to(tmp_path: Path) -> None:
    told = on_ranks(2, functools.partial(train_with, on_disagreement="raise"), "ddp", tmp_path)
    assert told[0] == told[1]
    assert told[0][0].startswith("step 3: up.weight/param differs on ranks 0, 1 along dp")


def test_traces_are_taken_in_the_middle_of_a_run(tmp_path: Path) -> None:
    schedule = ttrace.TraceSchedule(wait=1, active=1, repeat=2)
    on_ranks(2, functools.partial(train_with, trace=schedule, on_disagreement=print), "ddp", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-3"]
    trace = Trace(tmp_path / "step-1")
    assert trace.manifest.num_ranks == 2
    assert {str(tensor_id.kind) for tensor_id in trace.shards} >= {"param", "output", "param_grad", "update"}


def test_one_process_has_nothing_to_compare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ttrace.watch(model, optimizer, every=1, out=tmp_path)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert [one.trouble for one in monitor.disagreements] == [Trouble.REPEATED_DATA]
    monitor.close()
    assert not model._forward_pre_hooks
    assert "step 1: rank 0 trained twice in a row on the same data" in caplog.text


def test_every_step_count_must_be_positive() -> None:
    with pytest.raises(ttrace.CaptureError, match="at least 1"):
        ttrace.watch(nn.Linear(1, 1), every=0)


def fail_on_one_rank(out: Path) -> tuple[int, int]:
    """A rank whose model cannot be read switches the watch off everywhere, and all train on."""
    run = Run("ddp", do_nothing)
    monitor = ttrace.watch(run.model, run.optimizer, every=1, out=out)
    if run.rank == 1:
        monitor._replicas.collect = lambda: iter([{}[0]])  # type: ignore[index,method-assign]
    for step in range(3):
        run.model(torch.full((2, 4), step + run.rank)).square().mean().backward()
        run.optimizer.step()
    return monitor.num_checks, len(monitor.disagreements)


def test_a_fault_of_the_watch_does_not_end_the_training(tmp_path: Path) -> None:
    assert on_ranks(2, fail_on_one_rank, tmp_path) == [(1, 0), (0, 0)]


def test_a_trace_in_mid_run_has_all_microbatches_of_a_model_that_is_one_module(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ttrace.TraceSchedule(wait=1)
    monitor = ttrace.watch(model, optimizer, out=tmp_path, trace=schedule)
    for number in range(6):
        model(torch.randn(2, 4)).sum().backward()
        if number % 2:
            optimizer.step()
    monitor.close()
    outputs = [tensor_id for tensor_id in Trace(tmp_path / "step-1").shards if tensor_id.kind is Kind.OUTPUT]
    assert [tensor_id.microbatch for tensor_id in outputs] == [0, 1]


def test_a_trace_needs_a_step_before_it() -> None:
    with pytest.raises(ttrace.CaptureError, match="at least one step must precede a trace"):
        ttrace.TraceSchedule(wait=0)
