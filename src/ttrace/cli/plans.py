"""Plans from the options of a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ttrace.capture.plan import Plan
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.rules import read_table
from ttrace.ports.port_map import PortMap


def make_plan(
    out: Path,
    *,
    seed: int,
    steps: int,
    only: Sequence[str],
    skip: Sequence[str],
    record: Literal["auto", "full", "sketch"],
    budget: float,
    full: Sequence[str],
    own_parameters: bool,
    compiled: Literal["eager", "boundary"],
    microbatch_grads: bool,
    forward_only: bool,
    deterministic: bool,
    attach: Literal["auto", "script"],
    data: Literal["generated", "own"],
    mesh: str,
    rules: Path | None,
    port: str = "",
    store: str = "",
) -> Plan:
    """Make the plan that these options describe; each parameter is named as its option."""
    return Plan(
        out=out,
        store=store,
        seed=seed,
        num_steps=steps,
        only=tuple(only),
        skip=tuple(skip),
        record=record,
        budget=max(1, round(budget * 1e9)),
        full=tuple(full),
        parameters="own" if own_parameters else "generated",
        compiled=compiled,
        microbatch_grads=microbatch_grads,
        forward_only=forward_only,
        deterministic=deterministic,
        attach=attach,
        data=data,
        mesh=str(Mesh.parse(mesh.replace(",", " "))) if mesh else "",
        rules={} if rules is None else read_table(rules),
        port=PortMap.load(port) if port else None,
    )
