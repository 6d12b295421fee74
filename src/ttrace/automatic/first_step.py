"""The first training step of a script: its models, its optimizers, and where data enters.

`watch.py` describes the states that a script goes through.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from ttrace.adapters.deepspeed.compat import is_engine
from ttrace.adapters.wrappers import find_wrapped
from ttrace.attach import PLAN_VARIABLE
from ttrace.automatic.data_sources import Line
from ttrace.compat.distributed import list_stage_modules, read_num_chunks
from ttrace.errors import CaptureError

if TYPE_CHECKING:
    from ttrace.capture.plan import Plan
    from ttrace.capture.state.snapshot import Snapshot
    from ttrace.trace.format import Attachment


class FirstStep:
    """Observations of the first step, and the state from before it."""

    def __init__(self) -> None:
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        """All optimizers of the process."""
        self._optimizer_names: set[str] = set()
        self._has_target = self._has_early_step = False
        self._draws: Counter[Line] = Counter()
        self._calls: dict[nn.Module, int] = {}
        self._stepped: dict[Optimizer, bool] = {}
        """The optimizers that have stepped, in order; True for an optimizer that another optimizer steps."""
        self._saved: WeakSet[Optimizer] = WeakSet()
        """The optimizers whose state is in a snapshot."""
        self._loaders: WeakSet[Any] = WeakSet()
        """The loaders whose batches were followed by a training call."""
        self._last_loader: Any = None
        self._num_chunks = self._num_batches = 0
        self._has_loss = False
        self._class_counts: set[int] = set()
        self._widths: set[int] = set()
        """The last dims of the model's outputs, which are logits if the script computes its loss without torch's."""
        self._snapshots: list[Snapshot] = []

    @cached_property
    def plan(self) -> Plan:
        """The plan of this process."""
        from ttrace.capture.plan import Plan

        return Plan.find(os.environ[PLAN_VARIABLE])

    def on_optimizer(self, optimizer: Optimizer) -> None:
        """Note a new optimizer."""
        self._optimizers.add(optimizer)
        self._optimizer_names.add(type(optimizer).__name__)

    def on_call(self, module: nn.Module) -> None:
        """Count a training call of a module that is not inside another call. Before the first, save the state."""
        if module not in self._calls:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            # Not when an optimizer steps: ZeRO steps one parameter group at a time, and hides the others.
            optimizers = [each for each in self._optimizers if each not in self._saved]
            self._saved.update(optimizers)
            self._save([module], optimizers, with_parameters=self.plan.parameters == "own")
            self._calls[module] = 0
        self._calls[module] += 1
        if self._last_loader is not None:
            self._loaders.add(self._last_loader)

    def on_result(self, module: nn.Module, result: Any) -> None:
        """Note whether the model returns a loss, which means that labels were among its arguments, or logits."""
        if module not in self._calls:
            return
        leaves = pytree.tree_leaves(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._has_loss |= any(output.ndim == 0 for output in outputs)
        self._widths.update(output.shape[-1] for output in outputs if output.ndim > 1 and not output.is_nested)

    def on_batch(self, loader: Any) -> None:
        self._last_loader = loader
        self._num_batches += 1

    def is_training_loader(self, loader: Any) -> bool:
        """Return whether a training call followed a batch of this loader."""
        return loader in self._loaders

    def on_target(self) -> None:
        """Note that a loss function outside of the model got labels."""
        self._has_target = True

    def on_classes(self, count: int) -> None:
        """Note the number of classes in the logits of a loss."""
        self._class_counts.add(count)

    def on_draw(self, line: Line) -> None:
        if self._optimizers and not self._stepped:
            self._draws[line] += 1

    def is_data_line(self, line: Line) -> bool:
        """Return whether this line drew random numbers in the first step, equally often for each microbatch."""
        return self.count_draws(line) > 0

    def count_draws(self, line: Line) -> int:
        """Return how often a line drew for each microbatch; 0 if it did not draw equally often for each."""
        num_draws, rest = divmod(self._draws[line], max(self.num_microbatches, 1))
        return 0 if rest else num_draws

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that this rank ran in the first step."""
        return self._num_chunks or max(self._calls.values(), default=0)

    @property
    def is_pipeline(self) -> bool:
        return self._num_chunks > 0

    def on_schedule(self, schedule: Any) -> None:
        """Note the stages of a pipeline and its number of microbatches."""
        self._num_chunks = read_num_chunks(schedule)
        for module in list_stage_modules(schedule):
            self.on_call(module)

    def on_step_begin(self, optimizer: Optimizer) -> None:
        """Save the state of an optimizer that was created after the first call."""
        if optimizer not in self._saved:
            self._saved.add(optimizer)
            self._save([], [optimizer], with_parameters=False)

    def on_step_end(self, optimizer: Optimizer, *, is_inner: bool) -> None:
        """Note an optimizer that has stepped; with `is_inner`, another optimizer called it.

        A step before any training call only initialises the optimizer's state, as in DeepSpeed.
        """
        if self._calls:
            self._stepped.setdefault(optimizer, is_inner)
        else:
            self._has_early_step = True
            self._saved.clear()
            self._snapshots.clear()

    def is_over(self) -> bool:
        """Return whether all optimizers have stepped that have parameters of the called modules."""
        if not self._stepped:
            return False
        trained = {id(each) for model in self._calls for each in model.parameters() if each.requires_grad}
        not_updated = trained - _list_parameters(self._stepped)
        waiting = (each for each in self._optimizers if each not in self._stepped)
        return not any(_list_parameters([each]) & not_updated for each in waiting)

    @cached_property
    def models(self) -> list[nn.Module]:
        """The outermost modules that were called and that the optimizers train.

        They are this rank's stages of a pipeline, or separate models such as a generator and a discriminator.
        """
        engines = [model for model in self._calls if is_engine(model)]
        if engines:  # an engine's optimizer updates flat copies of the parameters
            return engines
        updated = _list_parameters(self._stepped)
        trained = [model for model in self._calls if any(id(each) in updated for each in model.parameters())]
        inner = {id(child) for model in trained for child in model.modules() if child is not model}
        models = [model for model in trained if id(model) not in inner]
        if not models:
            names = ", ".join(type(each).__name__ for each in self._stepped)
            raise CaptureError(
                f"{names} stepped, but none of its parameters belongs to a module that the script called: a framework "
                "keeps copies of them. Call ttrace.attach in the script, with an adapter for this framework."
            )
        return models

    @property
    def calls_per_microbatch(self) -> int:
        """How often the first model is called for each microbatch; a batch may pass through it repeatedly."""
        num_calls = self._calls[self.models[0]]
        return num_calls // self._num_batches if self._num_batches and num_calls % self._num_batches == 0 else 1

    @property
    def outer_optimizers(self) -> list[Optimizer]:
        """The optimizers that the script steps itself."""
        return [optimizer for optimizer, is_inner in self._stepped.items() if not is_inner]

    def describe(self) -> Attachment:
        """Describe what was observed, for the trace."""
        from ttrace.trace.format import Attachment

        return Attachment(
            model=", ".join(map(describe_model, self.models)),
            optimizers=tuple(type(each).__name__ for each in self.outer_optimizers),
            data=self._describe_data(),
            keeps_data=self.plan.data == "own",
            num_microbatches=self.num_microbatches,
            labels=bool(self._loaders or self._has_target or self.has_draws or self._has_loss),
            class_counts=tuple(sorted(self._class_counts or self._widths)),
        )

    @property
    def has_draws(self) -> bool:
        return any(map(self.is_data_line, self._draws))

    def _describe_data(self) -> str:
        loaders = sorted({type(each).__name__ for each in self._loaders})
        parts = (
            f"batches of {', '.join(loaders)}" if loaders else "arguments of the model's call",
            "random numbers that the script draws" if self.has_draws else "",
            "labels of a loss function" if self._has_target and not loaders else "",
        )
        return ", ".join(filter(None, parts))

    def _save(self, models: list[nn.Module], optimizers: list[Optimizer], *, with_parameters: bool) -> None:
        from ttrace.capture.state.snapshot import Snapshot

        self._snapshots.append(Snapshot(models, optimizers, with_parameters=with_parameters))

    def restore(self) -> None:
        """Restore the state from before the step, the first snapshot last: its random generators are the right ones.

        The script itself must set gradients to zero: the session shows if it does not, and then drops them.
        """
        for snapshot in reversed(self._snapshots):
            snapshot.restore(keeps_gradients=True)
        self._snapshots.clear()

    def describe_problem(self) -> str:
        """Return a sentence on why nothing was traced; empty if the process does not train."""
        if self._stepped:
            return (
                "the script ended after its first training step. TTrace watches the first step and traces the second: "
                "let the script run at least two, or attach by hand (docs/howto/unchanged.md)."
            )
        if self._calls and self._optimizer_names:
            names = ", ".join(sorted(self._optimizer_names))
            return f"the script called its model, but no optimizer stepped ({names})."
        if self._has_early_step:
            names = ", ".join(sorted(self._optimizer_names))
            return f"{names} stepped, but the script called no module in training mode. Attach by hand."
        return ""


def _list_parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def describe_model(model: nn.Module) -> str:
    """Name the classes of a model and of its wrappers, such as `DDP(GPT)`."""
    name, inner = type(model).__name__, find_wrapped(model)
    return name if inner is None else f"{name}({describe_model(inner)})"
