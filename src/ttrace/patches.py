"""Patches of attributes of other packages, all of which can be removed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CellType
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes of modules, classes and objects. `remove` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. If the owner had inherited it, `remove` deletes it."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, before))

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by the result of `make`, which gets its current value."""
        self.replace(owner, name, make(getattr(owner, name)))

    def wrap_cell(self, cell: CellType, make: Callable[[Any], Any]) -> None:
        """Replace a variable of a closure, as `wrap` does for an attribute."""
        before = cell.cell_contents
        cell.cell_contents = make(before)
        self._undo.append(lambda: setattr(cell, "cell_contents", before))

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Register a function that `remove` calls, in the same reverse order."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Remove all patches, even if removing one fails; then raise the first error."""
        errors: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class OutermostCall(threading.local):
    """Detection of the script's own call of a patched function.

    In a `__torch_function__` mode, such as a default device, torch looks the function up and calls it a second time.
    """

    is_running = False

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the original function; calls inside of it are not the script's."""
        self.is_running = True
        try:
            return original(*args, **kwargs)
        finally:
            self.is_running = False


class SharedPatches:
    """Patches that several users share, because ranks may be threads of one process.

    The first user installs them and the last one removes them, so they are never removed in the wrong order.
    """

    def __init__(self, install: Callable[[Patches], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._num_users = 0
        self._patches = Patches()

    def acquire(self) -> None:
        """Install the patches if needed; they stay until `release`."""
        with self._lock:
            if self._num_users == 0:
                try:
                    self._install(self._patches)
                except BaseException:
                    self._patches.remove()
                    raise
            self._num_users += 1

    def release(self) -> None:
        """Undo one `acquire`."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._patches.remove()
