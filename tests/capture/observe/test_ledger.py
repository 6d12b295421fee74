"""The ledger has every collective that ranks issue, with its module, its ranks and its line, whoever issues it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.ledgers import keep_ledger, keep_notes
from ttrace.layouts.ids import Phase
from ttrace.layouts.mesh import Mesh
from ttrace.trace.collectives import Collective
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks

RANKS = 4
Found = dict[str, Any]


class Block(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recomputes = nn.Linear(8, 16), nn.Linear(16, 8), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            hidden: torch.Tensor = checkpoint(self._run, x, use_reentrant=False)
            return x + hidden
        return x + self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).relu())
        return hidden


class Summed(torch.autograd.Function):
    """Communicates in its backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
        return gradient


class Copying(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Summed.apply(x)  # type: ignore[no-untyped-call]  # torch's has no types
        return out


def build(num_blocks: int = 3, *, recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(recomputes=recomputes) for _ in range(num_blocks)))


def train(model: nn.Module, *, watched: nn.Module | None = None, grads: bool = True) -> Callable[[], None]:
    def run() -> None:
        out = (watched or model)(torch.randn(4, 8, requires_grad=grads))
        out.square().mean().backward()

    return run


def with_tensor_parallelism(mesh: DeviceMesh, *, recomputes: bool = False) -> nn.Module:
    model = build(recomputes=recomputes)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def with_fsdp(mesh: DeviceMesh) -> nn.Module:
    model = build()
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def count(run: Callable[[], object]) -> int:
    """Count collectives as torch itself does."""
    with CommDebugMode() as mode:
        run()
    return int(mode.get_total_counts())


class CountMessages(TorchDispatchMode):
    """Counts messages: CommDebugMode does not, and fails in the backward pass of a stage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
        return func(*args, **(kwargs or {}))


def count_messages(run: Callable[[], object]) -> int:
    with CountMessages() as mode:
        run()
    return int(mode.num)


def run_pipeline(rank: int) -> Callable[[], None]:
    group = dist.new_group(list(range(RANKS)))
    stage = PipelineStage(build(1), rank, RANKS, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, y: (out - y).square().mean())
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    arguments, target = ((x,) if rank == 0 else ()), (y if rank == RANKS - 1 else None)

    def run() -> None:
        schedule.step(*arguments, target=target)

    run()  # learn the shapes
    return run


def use_everything(mesh: DeviceMesh) -> Callable[[], None]:
    """Call each function of torch.distributed once."""
    group = mesh["tp"].get_group()
    first = dist.get_process_group_ranks(group)[0]

    def run() -> None:
        one, both = torch.ones(2), torch.ones(4)
        parts = [torch.ones(2), torch.ones(2)]
        dist.all_reduce(one, op=dist.ReduceOp.SUM, group=group)
        dist.all_gather_into_tensor(both, one, group=group)
        dist.all_gather(parts, one, group=group)
        dist.reduce_scatter_tensor(one, both, group=group)
        dist.broadcast(one, first, group=group)
        dist.reduce(one, first, group=group)
        dist.all_to_all_single(both, both.clone(), group=group)
        dist.scatter(one, parts if dist.get_rank() == first else None, first, group=group)
        dist.gather(one, parts if dist.get_rank() == first else None, first, group=group)
        dist.barrier(group=group)
        functional.all_reduce(one, "sum", group)
        work = dist.all_reduce(one, group=group, async_op=True)
        work.wait()

    return run


def list_notes(mesh: DeviceMesh) -> dict[str, list[str]]:
    """List the notes on buffers that are written early, and on some that are not."""
    buffer, parts = torch.ones(4), torch.ones(8)

    def write_early() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        buffer.mul_(2.0)
        work.wait()

    def write_late() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        work.wait()
        buffer.mul_(2.0)

    def write_elsewhere() -> None:
        work = dist.all_reduce(parts[:4], async_op=True)
        parts[4:].mul_(2.0)
        work.wait()

    return {run.__name__: keep_notes(mesh, run) for run in (write_early, write_late, write_elsewhere)}


def observe() -> Found:
    """Keep the ledger of every case, and count with CommDebugMode what it should have."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: Found = {}
    parallel, sharded, recomputed = (
        with_tensor_parallelism(mesh),
        with_fsdp(mesh),
        with_tensor_parallelism(mesh, recomputes=True),
    )
    for name, model in (("tp", parallel), ("fsdp", sharded), ("recomputed", recomputed)):
        train(model)()  # FSDP2 learns its order in the first step
        found[f"{name} counts"] = count(train(model))
        found[name] = keep_ledger(model, mesh, train(model))
    found["frozen input"] = keep_ledger(parallel, mesh, train(parallel, grads=False))
    plain = build()
    averaged = DistributedDataParallel(plain, process_group=mesh["dp"].get_group())
    train(plain, watched=averaged)()
    found["ddp"] = keep_ledger(plain, mesh, train(plain, watched=averaged))
    piped = run_pipeline(rank)
    found["pipeline counts"] = count_messages(piped)
    found["pipeline"] = keep_ledger(nn.Identity(), Mesh.of(pp=RANKS), piped)
    found["everything"] = keep_ledger(nn.Identity(), mesh, use_everything(mesh))
    copying = nn.Sequential(Copying(), nn.Linear(8, 8))
    found["backward"] = keep_ledger(copying, mesh, train(copying))
    found["notes"] = list_notes(mesh)
    odd = dist.new_group([0, 3])
    if rank in (0, 3):
        found["odd"] = keep_ledger(nn.Identity(), mesh, lambda: dist.all_reduce(torch.ones(1), group=odd))
    with torch.inference_mode():
        found["inference"] = keep_ledger(nn.Identity(), mesh, lambda: dist.all_reduce(torch.ones(1)))
    before = len(found["inference"])
    dist.all_reduce(torch.ones(1))
    assert len(found["inference"]) == before, "an ended ledger gets nothing more"
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return on_ranks(RANKS, observe, timeout=2 * HANG)


def describe(entries: list[Collective]) -> list[tuple[str, str, str]]:
    return [(one.module, one.phase.value, str(one)) for one in entries]


@pytest.mark.parametrize("case", ["tp", "fsdp", "recomputed", "pipeline"])
def test_the_ledger_has_as_many_collectives_as_torch_counts(ranks: list[Found], case: str) -> None:
    for rank in ranks:
        assert len(rank[case]) == rank[f"{case} counts"] > 0


def test_collectives_of_dtensor_are_in_the_module_that_needs_them(ranks: list[Found]) -> None:
    summed = "all_reduce (sum) over tp"
    forward = [(f"{i}.down", "forward", summed) for i in range(3)]
    backward = [(f"{i}.up", "backward", summed) for i in (2, 1, 0)]
    assert describe(ranks[0]["tp"]) == forward + backward
    assert describe(ranks[3]["frozen input"]) == forward + backward[:-1]
    assert {one.issuer for one in ranks[0]["tp"]} == {"DTensor"}


def test_a_recomputation_is_told_from_forward_and_backward(ranks: list[Found]) -> None:
    phases = Counter((one.module, one.phase) for one in ranks[0]["recomputed"])
    assert phases["1.down", Phase.FORWARD] == 1
    assert phases["1.up", Phase.BACKWARD] == 1
    assert phases["1.down", Phase.RECOMPUTE] <= 1
    assert sum(phases.values()) == len(ranks[0]["recomputed"])


def test_fsdp_and_ddp_are_named(ranks: list[Found]) -> None:
    sharded = ranks[1]["fsdp"]
    assert {one.issuer for one in sharded} == {"FSDP2"}
    assert {str(one.group) for one in sharded} == {"dp"}
    assert Counter(one.op for one in sharded)["reduce_scatter"] >= 3
    averaged = [one for one in ranks[2]["ddp"] if one.phase is Phase.BACKWARD]
    assert {("all_reduce", "DDP", "dp")} == {(one.op, one.issuer, str(one.group)) for one in averaged}
    assert {one.issuer for one in ranks[2]["ddp"]} == {"DDP"}, "it also compares the order of its buckets"


def test_messages_of_a_pipeline_name_the_other_rank(ranks: list[Found]) -> None:
    first, second = ranks[0]["pipeline"], ranks[1]["pipeline"]
    assert Counter((one.op, one.peer) for one in first) == {("send", 1): 4, ("recv", 1): 4}
    assert Counter((one.op, one.peer) for one in second) == {
        ("recv", 0): 4,
        ("send", 0): 4,
        ("send", 2): 4,
        ("recv", 2): 4,
    }
    assert {one.issuer for one in first} == {"pipelining"}


def test_every_function_of_torch_distributed_is_seen_with_its_line(ranks: list[Found]) -> None:
    entries = ranks[2]["everything"]
    assert [one.op for one in entries] == [
        "all_reduce",
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "scatter",
        "gather",
        "barrier",
        "all_reduce",
        "all_reduce",
    ]
    lines, first = inspect.getsourcelines(use_everything)
    for one in entries:
        file, _, line = one.source.rpartition(":")
        assert file == __file__
        assert "dist." in lines[int(line) - first] or "functional." in lines[int(line) - first]
    assert [one.is_async for one in entries] == [False] * 10 + [True] * 2
    assert [one.what for one in entries] == [one.what for one in ranks[3]["everything"]]
    assert (entries[4].peer, entries[0].shape, entries[0].num_bytes, entries[3].num_bytes) == (2, (2,), 8, 16)


def test_a_custom_backward_is_named_by_its_own_line_and_its_module(ranks: list[Found]) -> None:
    (one,) = ranks[0]["backward"]
    lines, first = inspect.getsourcelines(Summed)
    assert (one.module, one.phase, str(one)) == ("0", Phase.BACKWARD, "all_reduce (max) over dp+tp")
    assert "dist.all_reduce" in lines[int(one.source.rpartition(":")[2]) - first]


def test_ranks_that_no_axes_give_are_listed(ranks: list[Found]) -> None:
    assert [str(one.group) for one in ranks[3]["odd"]] == ["ranks 0, 3"]


def test_a_buffer_that_is_written_too_early_is_noted(ranks: list[Found]) -> None:
    for rank in ranks:
        (note,) = rank["notes"].pop("write_early")
        assert "the buffer of all_reduce (sum) over dp+tp" in note
        assert "was written before it was waited for" in note
        assert rank["notes"] == {"write_late": [], "write_elsewhere": []}


def test_inference_mode_hides_nothing(ranks: list[Found]) -> None:
    assert len(ranks[0]["inference"]) == 1
