"""Entry point for training scripts; it does nothing unless the script was started by `ttrace`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from ttrace.adapters.adapter import Adapter, Optimizer
    from ttrace.adapters.native.adapter import MeshLike

_Batch = TypeVar("_Batch")

PLAN_VARIABLE = "TTRACE_PLAN"
"""The environment variable that switches `attach` on: the path of a plan, and the launch that it is for."""


_callbacks: list[Callable[[], None]] = []


def on_attach(callback: Callable[[], None]) -> None:
    """Call this function when a script attaches by itself."""
    _callbacks.append(callback)


class Session(Protocol):
    """A traced training. A script gets one from `ttrace.attach`."""

    def step(self) -> AbstractContextManager[None]:
        """Enter the returned block around one optimizer update.

        The script ends as soon as everything is recorded: a candidate after the last traced step, a reference after a
        few more iterations, which are its twins.
        """

    def batch(self, batch: _Batch) -> _Batch:
        """Return the data to train on instead: this rank's part of generated data.

        Call it once for each microbatch, inside of a step; outside of one it raises a `CaptureError`.
        """

    def close(self) -> None:
        """Stop tracing before the plan's last step."""


class DisabledSession:
    """A session that does nothing."""

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def batch(self, batch: _Batch) -> _Batch:
        return batch

    def close(self) -> None:
        pass


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    mesh: MeshLike | None = None,
    rules: Mapping[str, str] | Path | str | None = None,
    mb_axis_size: int = 1,
    grad_factor: float | None = None,
    adapter: type[Adapter] | Adapter | None = None,
) -> Session:
    """Trace this model's training steps, if the script was started by `ttrace`; otherwise set no hook at all.

    Call it after the model is parallelised and the process group exists.

    - `model`: the model as it was wrapped, or a list of this rank's pipeline stages.
    - `optimizer`: the optimizer whose steps, states and updates are traced, or a list of several.
    - `mesh`: for hand-written parallelism, the axes, slowest first: `{"dp": 2, "tp": 4}`, `"dp=2 tp=4"`, a `DeviceMesh`
      or a `ttrace.Mesh`. The process groups of Megatron state the mesh: there it raises a `CaptureError`.
    - `rules`: layouts by site, as a mapping (`{"*.fc1/output": "batch hidden/tp"}`), or the path of a TOML file with a
      table `[layouts]`.
    - `mb_axis_size`: the size of the axis `mb`, for rules that name it: the number of microbatches in a step that
      together hold one tensor of the reference.
    - `grad_factor`: the factor that a later reduction still applies to activation gradients, such as 1/dp; DDP, FSDP2
      and pipelining state it themselves.
    - `adapter`: the adapter to use, a class or an instance; by default the registered one that recognizes the model.
    """
    if not os.environ.get(PLAN_VARIABLE):
        return DisabledSession()
    for callback in _callbacks:
        callback()
    from ttrace.capture.parts import Declarations
    from ttrace.capture.start import start_session
    from ttrace.layouts.rules import Rules

    declared = Declarations(mesh, Rules.of(rules), mb_axis_size, grad_factor, adapter)
    return start_session(model, optimizer, declared, address=os.environ[PLAN_VARIABLE])
