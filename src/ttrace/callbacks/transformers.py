"""Callback for transformers' Trainer, and for those that build on it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ttrace.callbacks.training_watch import TrainingWatch


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
