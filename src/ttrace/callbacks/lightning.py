"""Callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the package
    from pytorch_lightning import Callback  # type: ignore[assignment]

from ttrace.callbacks.training_watch import TrainingWatch
from ttrace.monitor.monitor import Monitor
from ttrace.monitor.watch import watch


class TTraceCallback(Callback):
    """Trace the training of this Trainer, if the script was started by `ttrace`.

    The arguments are those of `ttrace.attach` after the model and the optimizer, which the callback finds.
    """

    def __init__(self, **declared: Any) -> None:
        self._watch = TrainingWatch(declared)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if stage == "fit":
            self._watch.start()

    def on_fit_end(self, *_: Any) -> None:
        self._watch.stop()


class WatchCallback(Callback):
    """Watch the training of this Trainer without a reference; the arguments are those of `ttrace.watch`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self.monitor = watch(trainer.strategy.model, trainer.optimizers, **self._settings)

    def on_train_end(self, *_: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
