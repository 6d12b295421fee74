"""The part of the callbacks that is the same for all frameworks: watching for the training step."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from ttrace.attach import PLAN_VARIABLE, attach

if TYPE_CHECKING:
    from ttrace.automatic.watch import Watch


class TrainingWatch:
    """Watch over one training. It does nothing unless the script was started by `ttrace`."""

    def __init__(self, declared: dict[str, Any]) -> None:
        """Take the keyword arguments of `ttrace.attach`."""
        inspect.signature(attach).bind(None, **declared)  # a wrong name is an error in every run
        self._declared = declared
        self._watch: Watch | None = None

    def start(self) -> None:
        if not os.environ.get(PLAN_VARIABLE):
            return
        from ttrace.automatic.installation import install
        from ttrace.capture.parts import Declarations
        from ttrace.layouts.rules import Rules

        self._watch = install(Declarations(**{**self._declared, "rules": Rules.of(self._declared.get("rules"))}))

    def stop(self) -> None:
        """End the traced step, or report why there was none."""
        if self._watch is not None:
            self._watch.close()
