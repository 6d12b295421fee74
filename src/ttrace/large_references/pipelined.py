"""References that run as a pipeline, for models that fit onto several devices, but not onto one.

This uses GPipe of torch.distributed.pipelining, without overlap or recomputation. Every operator runs as in one
process, on the same values and in the same order, so the trace has the same bits as that of one process. The model's
own `forward` runs on every stage. Blocks of other stages are removed. Modules before the blocks are replaced by
functions that return the input of the stage, and modules after the blocks by functions that return their own input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import (
    Spreads,
    check_buffers,
    check_patterns,
    choose_distribution,
    parameters_on_meta,
)
from ttrace.large_references.streamed import set_divided
from ttrace.layouts.region import Region
from ttrace.values.generate import generate_values

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of a model's output and the target."""


def pipelined(
    build: Callable[[], nn.Module],
    *,
    stage: int | None = None,
    num_stages: int | None = None,
    spreads: Spreads | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build this rank's part of a model without memory for other parts; pass it to `attach` and to `GPipe`.

    The blocks are the module list with the most parameters. Each stage has an equal share of them. The first stage also
    has the modules that are registered before the blocks, and the last stage those after them. Attach it with
    `mesh={"pp": num_stages}`, and run it with `GPipe` of `ttrace.large_references.pipelined`.
    """
    stage = dist.get_rank() if stage is None else stage
    num_stages = dist.get_world_size() if num_stages is None else num_stages
    with parameters_on_meta():
        model = build()
    check_buffers(model)
    _refuse_ties(model)
    path, blocks = _find_blocks(model)
    names = [name for name, _ in model.named_parameters()]
    check_patterns(spreads or {}, names)
    if len(blocks) < num_stages:
        raise CaptureError(f"{path} has only {len(blocks)} blocks for {num_stages} stages.")
    before, after = _find_neighbours(model, path)
    _leave_out(model, before if stage > 0 else [], after if stage < num_stages - 1 else [])
    first, last = (len(blocks) * number // num_stages for number in (stage, stage + 1))
    for number in range(len(blocks)):
        if not first <= number < last:
            del blocks._modules[str(number)]
    _materialise(model, spreads or {}, torch.device(device))
    parts = path.split(".")
    set_divided(model, [".".join(parts[:depth]) for depth in range(1, len(parts))])
    model.register_forward_hook(_take_first_tensor)
    return model


class GPipe:
    """Runner of this rank's stage: all microbatches forward, then all backward. The stage is the rank in the group.

    The loss is divided by the number of microbatches, as in a loop that accumulates gradients.
    """

    def __init__(
        self, stage: nn.Module, loss: Loss, num_microbatches: int, group: dist.ProcessGroup | None = None
    ) -> None:
        from torch.distributed.pipelining import (  # a slow import: it takes half as long as torch
            PipelineStage,
            ScheduleGPipe,
        )

        self._number, self._num_stages = dist.get_rank(group), dist.get_world_size(group)
        device = next(stage.parameters()).device
        self._schedule = ScheduleGPipe(
            PipelineStage(stage, self._number, self._num_stages, device, group=group),
            num_microbatches,
            loss_fn=lambda output, target: loss(output, target) / num_microbatches,
            scale_grads=False,
        )

    def step(self, *, target: torch.Tensor, **inputs: torch.Tensor) -> None:
        """Run all microbatches, forward and backward. Pass the whole batch to every stage, by the model's own names."""
        is_first, is_last = self._number == 0, self._number == self._num_stages - 1
        # Torch needs a positional input on the first stage, or it would receive one; `pipelined` ignores it.
        received: tuple[Any, ...] = tuple(inputs.values())[:1] if is_first else ()
        more: dict[str, Any] = {**inputs, "target": target} if is_last else dict(inputs)
        self._schedule.step(*received, **more)


@dataclass(frozen=True)
class _ModuleBefore:
    """Replacement of a module before the blocks: the first returns the input of the stage, the others return zeros."""

    received: list[torch.Tensor]
    is_first: bool

    def __call__(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        if value.is_floating_point():
            return value  # dropout of the stage's input
        return self.received[0] if self.is_first else self.received[0].new_zeros(())


def _pass_through(value: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """Return the input; replaces a module after the blocks."""
    return value


def _leave_out(model: nn.Module, before: list[str], after: list[str]) -> None:
    """Replace the modules of other stages by functions, which `named_modules` does not list."""
    received: list[torch.Tensor] = []

    def receive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
        received[:] = args[:1]
        return (), kwargs  # the first stage gets its input by name as well

    model.register_forward_pre_hook(receive, with_kwargs=True)
    for number, path in enumerate(before):
        _replace(model, path, _ModuleBefore(received, is_first=number == 0))
    for path in after:
        _replace(model, path, _pass_through)


def _replace(model: nn.Module, path: str, function: Callable[..., Any]) -> None:
    owner, _, name = path.rpartition(".")
    parent = model.get_submodule(owner)
    del parent._modules[name]
    object.__setattr__(parent, name, function)


def _take_first_tensor(module: nn.Module, args: Any, output: Any) -> torch.Tensor:  # noqa: ARG001
    """Return the tensor that a stage sends on. Hooks of sessions run before this one and get the model's output."""
    first: torch.Tensor = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return first


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise CaptureError("this model has no list of modules, so it is unknown where to cut it into stages.")
    return max(lists, key=lambda pair: sum(parameter.numel() for parameter in pair[1].parameters()))


def _find_neighbours(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Find the modules of the first stage and of the last stage only. All stages have others, such as rotary tables."""
    before: list[str] = []
    after: list[str] = []
    owner = ""
    for part in path.split("."):
        is_passed = False
        for name, child in model.get_submodule(owner).named_children():
            if name == part:
                is_passed = True
            elif any(True for _ in child.parameters()) or isinstance(child, nn.Dropout):
                (after if is_passed else before).append(f"{owner}.{name}".lstrip("."))
        owner = f"{owner}.{part}".lstrip(".")
    return before, after


def _materialise(model: nn.Module, spreads: Spreads, device: torch.device) -> None:
    """Allocate this stage's parameters and generate their values."""
    for owner_path, owner in model.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            path = f"{owner_path}.{name}".lstrip(".")
            values = generate_values(
                path,
                Region.whole(tuple(parameter.shape)),
                dtype=parameter.dtype,
                distribution=choose_distribution(path, parameter, owner, spreads),
                device=device,
            )
            real = nn.Parameter(values, requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            owner._parameters[name] = real


def _refuse_ties(model: nn.Module) -> None:
    for alias, name in _find_ties(model):
        raise CaptureError(
            f"{alias} is tied to {name}: each stage would have a copy, and gradients would be summed in another "
            "order than in one process. Untie them, or use ttrace.streamed."
        )


def _find_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            yield name, first[parameter]
