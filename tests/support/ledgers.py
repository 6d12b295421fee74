"""Ledgers of collectives: kept while a function runs, or made up line by line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ttrace.adapters.native.adapter import MeshLike, Native
from ttrace.capture.observe.events import StepCounter
from ttrace.capture.observe.ledger import Ledger
from ttrace.capture.observe.torch_patches import patch_torch
from ttrace.capture.plan import Plan
from ttrace.layouts.ids import ROOT, Phase
from ttrace.trace.collectives import Collective, Group, decode_collectives, encode_collective
from ttrace.trace.format import End, Manifest, ModuleInfo
from ttrace.trace.reader import Trace
from ttrace.trace.seal import seal_line
from ttrace.trace.writer import Writer
from zoo.harness.ledgers import LedgerEvents


def keep_ledger(model: nn.Module, mesh: MeshLike, run: Callable[[], object]) -> list[Collective]:
    """Run a function, and return what this rank communicated meanwhile."""
    found, notes = _keep(model, mesh, run)
    assert notes == []
    return found


def keep_notes(mesh: MeshLike, run: Callable[[], object]) -> list[str]:
    """Run a function, and return what its ledger notes."""
    return _keep(nn.Identity(), mesh, run)[1]


def _keep(model: nn.Module, mesh: MeshLike, run: Callable[[], object]) -> tuple[list[Collective], list[str]]:
    lines, clock = list[str](), StepCounter()
    names = [(name or ROOT, module) for name, module in model.named_modules()]
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(out=Path(folder), role="candidate")
        ledger = Ledger(plan, Native([model], mesh=mesh), clock, names, lines.append)
        try:
            with clock.running(), patch_torch(LedgerEvents(ledger)):
                run()
        finally:
            ledger.remove()
    data = "".join(f"{seal_line(line)}\n" for line in lines).encode()
    return list(decode_collectives(data, "the ledger", None)), list(ledger.notes)


def make_collective(
    op: str = "all_reduce",
    module: str = "",
    phase: Phase = Phase.FORWARD,
    *,
    axes: tuple[str, ...] = ("tp",),
    **more: Any,
) -> Collective:
    """Make a line of a ledger; `more` are other fields of it."""
    usual = {
        "order": 0,
        "step": 0,
        "microbatch": 0,
        "reduction": "sum" if op in ("all_reduce", "reduce_scatter") else "",
        "shape": (4,),
        "dtype": "float32",
        "num_tensors": 1,
        "num_bytes": 16,
        "is_async": False,
        "source": "train.py:7",
        "begin": 1,
    }
    return Collective(op=op, module=module, phase=phase, group=Group(axes=axes), **{**usual, **more})


def write_ledgers(folder: Path, mesh: str, ledgers: list[list[Collective]], modules: Mapping[str, str] = {}) -> Trace:
    """Write a candidate without tensors, whose ranks communicated this."""
    for rank, entries in enumerate(ledgers):
        known = {name: ModuleInfo(type=kind) for name, kind in modules.items()}
        manifest = Manifest(role="candidate", rank=rank, num_ranks=len(ledgers), mesh=mesh, seed=0, modules=known)
        writer = Writer(folder, manifest)
        for one in entries:
            writer.write_collective(encode_collective(one))
        writer.close(End(num_steps=1))
    return Trace(folder)
