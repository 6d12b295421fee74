"""Entry point for scripts that watch a long run; torch and adapters are imported when it is called."""

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
    from ttrace.monitor.trace_schedule import TraceSchedule


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
    """Watch a training without a reference: every so many steps, compare what must be equal on several ranks.

    Call it after the model is parallelised, on all ranks. `mesh`, `rules` and `adapter` are those of `attach`. What is
    found is logged on rank 0, raised on all, or passed to a function on all; the tensors that differ are written into
    `out`. `trace` takes full traces in the middle of the run, into the same folder. The monitor has `disagreements`,
    `check()` for a check at once on all ranks, and `close()`.
    """
    from ttrace.capture.start import Declarations
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
