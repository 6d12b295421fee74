"""Callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under the name of its other package
    from pytorch_lightning import Callback  # type: ignore[assignment]

from ttrace.callbacks.training_watch import TrainingWatch


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
