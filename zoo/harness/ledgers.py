"""Events of a step of which only the collectives are kept, in a ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ttrace.capture.observe.events import SessionEvents
from ttrace.capture.observe.ledger import Ledger


class LedgerEvents(SessionEvents):
    """Passes collectives on to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_collective(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        return self._ledger.observe(name, arguments, run)

    def on_wait(self, work: Any) -> None:
        self._ledger.on_wait(work)
