"""Start of a session: the plan, the adapter and what a script or the command line declares come together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from ttrace.adapters.adapter import Adapter, Optimizer, find_rank_and_world, list_optimizers
from ttrace.adapters.framework_compat import unwrap_module, unwrap_optimizer
from ttrace.adapters.native.adapter import MeshLike
from ttrace.adapters.registry import make_adapter
from ttrace.capture.consecutive import ConsecutiveSessions
from ttrace.capture.plan import Plan
from ttrace.capture.process import wait_for_gloo_at_exit
from ttrace.capture.session import TracingSession
from ttrace.capture.state.snapshot import Snapshot
from ttrace.errors import CaptureError
from ttrace.layouts.rules import Rules
from ttrace.trace.format import Attachment


@dataclass(frozen=True)
class Declarations:
    """What a script tells `attach` of its parallelism."""

    mesh: MeshLike | None = None
    rules: Rules = field(default_factory=Rules)
    num_microbatches: int = 1
    grad_factor: float | None = None
    adapter: type[Adapter] | Adapter | None = None

    def or_planned(self, plan: Plan) -> Declarations:
        """Take the mesh and the rules of the command line, where the script declares none; refuse rules of both."""
        mesh, rules = self.mesh, self.rules
        if mesh is None and plan.mesh:
            is_alone = find_rank_and_world()[1] == 1  # the reference has the same axes, with one rank along each
            mesh = re.sub(r"\d+", "1", plan.mesh) if is_alone else plan.mesh
        if rules.rules and plan.rules:
            raise CaptureError(
                "the script states rules (ttrace.attach(rules=...)), and so does the command line (--rules), but only "
                "one list of rules is used. Leave one of them out."
            )
        if plan.rules:
            rules = Rules.of(plan.rules, origin="--rules")
        return Declarations(mesh, rules, self.num_microbatches, self.grad_factor, self.adapter)


def choose_adapter(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer] | None, declared: Declarations
) -> tuple[list[nn.Module], Optimizer | None, Adapter]:
    """Choose the adapter for what a script passes; return the chunks, the optimizer to observe, and the adapter."""
    chunks = [
        unwrap_module(each) for each in (model if isinstance(model, (list, tuple)) else [cast("nn.Module", model)])
    ]
    optimizers = [unwrap_optimizer(each) for each in list_optimizers(optimizer)]
    given = optimizers[0] if len(optimizers) == 1 else optimizers or None
    adapter = make_adapter(declared.adapter, chunks, given, declared.mesh)
    return chunks, adapter.find_optimizer(given), adapter


def start_session(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    declared: Declarations,
    attachment: Attachment | None = None,
    *,
    address: str,
) -> TracingSession | ConsecutiveSessions:
    """Start to trace as the plan at this address says; `attachment` is what automatic attachment found."""
    plan = Plan.find(address)
    wait_for_gloo_at_exit()
    declared = declared.or_planned(plan)
    chunks, optimizer, adapter = choose_adapter(model, optimizer, declared)

    def start(each: Plan) -> TracingSession:
        return TracingSession(
            each,
            chunks,
            optimizer,
            adapter,
            declared.rules,
            num_microbatches=declared.num_microbatches,
            grad_factor=declared.grad_factor,
            attachment=attachment,
        )

    if not plan.then:
        return start(plan)
    saved = Snapshot(chunks, adapter.find_torch_optimizers(optimizer), with_parameters=plan.parameters == "own")
    return ConsecutiveSessions(plan, start, saved)
