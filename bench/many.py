"""How long a very large graph takes: 10^5 modules that are attached, and 10^5 wrong tensors that are judged.

Attached are linear layers without weights of any size: the time is that of the hooks and the census. The wrong tensors
are in traces of one rank, tiny and all wrong, in three ways: after each other, as one wrong module makes them; each
module by itself; and every update, as a wrong optimizer makes them. CPU time is what counts, and the report is part of
the verdict.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.cli.outcome import write
from ttrace.judge.verdict import Exit
from ttrace.layouts.ids import TensorId
from ttrace.layouts.region import Region
from ttrace.trace.format import End, Manifest, ModuleInfo, Record
from ttrace.trace.writer import Writer
from ttrace.workflow.run import Run

NUM = 10**5
ATTACH_SECONDS, VERDICT_SECONDS = 10.0, 60.0
"""The bars, of CPU time."""
WAYS = {
    "after each other": ("input", "output", "grad_output", "grad_input"),
    "each by itself": ("output",),
    "every update": ("param_after",),
}
"""By the way in which all are wrong, the kinds that each module has."""


def attach(num_modules: int, out: Path) -> float:
    """Attach a model of so many modules; return the CPU time."""
    blocks = [nn.Sequential(*(nn.Identity() for _ in range(9))) for _ in range(num_modules // 10)]
    model = nn.Sequential(nn.Linear(1, 1), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.process_time()
    plan = Plan.model_validate({"out": out, "stop": False})
    session = TracingSession(SessionParts(plan, model, optimizer, Native([model])))
    seconds = time.process_time() - start
    session.close()
    return seconds


def write_trace(folder: Path, role: str, kinds: tuple[str, ...], num_tensors: int, wrong: float) -> None:
    """Write a trace of one rank in which every tensor is `wrong` away from the reference's."""
    # A wrong parameter after a step is a wrong update, too.
    num_each = 2 if "param_after" in kinds else len(kinds)
    names = [f"layers.{number}" for number in range(num_tensors // num_each)]
    manifest = Manifest(
        role=role,
        rank=0,
        num_ranks=1,
        mesh="",
        seed=0,
        modules={name: ModuleInfo(type="my.Layer", source="my.py:7") for name in names},
        parameters={f"{name}.weight": True for name in names},
    )
    writer = Writer(folder, manifest)
    draw = torch.Generator().manual_seed(0)
    noise = torch.Generator().manual_seed(1)
    for tensor_id in _list_ids(names, kinds):
        tensor = torch.randn(4, generator=draw)
        if tensor_id.kind != "param":
            tensor = tensor + wrong * torch.randn(4, generator=noise)
        writer.write(Record(tensor_id, (4,), tensor.dtype, Region.whole((4,)), layout="h"), tensor)
    writer.close(End(num_steps=1))


def _list_ids(names: list[str], kinds: tuple[str, ...]) -> Iterator[TensorId]:
    yield TensorId.parse("0/0/./output")
    for name in names:
        for kind in kinds:
            if kind == "param_after":
                yield TensorId.parse(f"0/-/{name}.weight/param")
            yield TensorId.parse(f"0/-/{name}.weight/{kind}" if kind == "param_after" else f"0/0/{name}/{kind}")


def judge(kinds: tuple[str, ...], num_tensors: int, folder: Path) -> tuple[float, int]:
    """Judge traces whose tensors are all wrong; return the CPU time, and how many are."""
    run = Run(folder)
    for role, path, wrong in (
        ("reference", run.reference, 0.0),
        ("twin", run.twin(1), 1e-7),
        ("candidate", run.candidate, 0.3),
    ):
        write_trace(path, role, kinds, num_tensors, wrong)
    start = time.process_time()
    found = run.judge()
    write(run, found)
    seconds = time.process_time() - start
    assert found.exit is Exit.FOUND, (found.exit, found.problems[:3])
    return seconds, sum(comparison.verdict.is_wrong for comparison in found.comparisons)


def main(option: str = "") -> int:
    num = NUM // 10 if option == "--quick" else NUM
    with tempfile.TemporaryDirectory() as scratch:
        attached = attach(num, Path(scratch) / "attached")
        print(f"{num:,} modules are attached in {attached:.1f} s (bar {ATTACH_SECONDS:.0f} s)", flush=True)
        slowest = 0.0
        for way, kinds in WAYS.items():
            seconds, num_wrong = judge(kinds, num, Path(scratch) / "run")
            shutil.rmtree(Path(scratch) / "run")
            print(f"{num_wrong:,} wrong tensors, {way}: a verdict in {seconds:.1f} s", flush=True)
            slowest = max(slowest, seconds)
    print(
        f"many: attach {attached:.1f} s (bar {ATTACH_SECONDS:.0f}), verdict {slowest:.1f} s (bar {VERDICT_SECONDS:.0f})"
    )
    return int(attached > ATTACH_SECONDS or slowest > VERDICT_SECONDS)
