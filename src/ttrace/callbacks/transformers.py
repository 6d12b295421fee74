"""Callback for transformers' Trainer, and for those that build on it."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ttrace.callbacks.training_watch import TrainingWatch
from ttrace.monitor.monitor import Monitor
from ttrace.monitor.watch import watch


class TTraceCallback(TrainerCallback):
    """Trace the training of this Trainer, if the script was started by `ttrace`.

    The arguments are those of `ttrace.attach` after the model and the optimizer, which the callback finds.
    """

    def __init__(self, **declared: Any) -> None:
        self._watch = TrainingWatch(declared)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._watch.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._watch.stop()


class WatchCallback(TrainerCallback):
    """Watch the training of this Trainer without a reference; the arguments are those of `ttrace.watch`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, *_: Any, **known: Any) -> None:
        """Watch the model before DDP wraps it. Ranks of a Trainer have different data, unless the model is sharded."""
        model, settings = known["model"], dict(self._settings)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if args.world_size > 1 and not is_sharded:
            settings.setdefault("mesh", {"dp": args.world_size})
        self.monitor = watch(model, known["optimizer"], **settings)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
