"""`ttrace.watch`, the entry point for scripts. Adapters are imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from ttrace.adapters.adapter import Adapter, Optimizer
    from ttrace.adapters.native.adapter import MeshLike
    from ttrace.monitor.disagreement import OnDisagreement
    from ttrace.monitor.monitor import Monitor
    from ttrace.monitor.schedule import TraceSchedule


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    every: int = 100,
    mesh: MeshLike | None = None,
    rules: Mapping[str, str] | Path | str | None = None,
    adapter: type[Adapter] | Adapter | None = None,
    on_disagreement: Literal["warn", "raise"] | OnDisagreement = "warn",
    out: Path | str = "ttrace-watch",
    trace: TraceSchedule | None = None,
) -> Monitor:
    """Watch a training without a reference: every `every` steps, compare what must be equal on several ranks.

    Call it on all ranks, after the model is parallelised. `mesh`, `rules` and `adapter` are those of `attach`.
    Disagreements are logged on rank 0 (`"warn"`), raised on all ranks (`"raise"`), or passed to a function on all
    ranks. Tensors that differ are written into `out`. `trace` records full traces in the middle of the run, into the
    same folder. The returned monitor has `disagreements`, `check()`, which checks at once and must be called on all
    ranks, and `close()`.
    """
    from ttrace.capture.parts import Declarations
    from ttrace.layouts.rules import Rules
    from ttrace.monitor.monitor import start_monitor

    return start_monitor(
        model,
        optimizer,
        Declarations(mesh, Rules.of(rules), adapter=adapter),
        every=every,
        on_disagreement=on_disagreement,
        out=Path(out),
        trace=trace,
    )
