"""Patches of somebody else's attributes, which are always put back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CellType
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes of modules, classes and objects. `remove` puts them back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; an attribute that the owner inherited is deleted again by `remove`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, before))

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` returns for the attribute as it is now."""
        self.replace(owner, name, make(getattr(owner, name)))

    def wrap_cell(self, cell: CellType, make: Callable[[Any], Any]) -> None:
        """Do the same for a variable that a closure holds."""
        before = cell.cell_contents
        cell.cell_contents = make(before)
        self._undo.append(lambda: setattr(cell, "cell_contents", before))

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Call this function when its turn comes in `remove`."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Put everything back. If one fails the others still follow, and the first error is raised at the end."""
        errors: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class OutermostCall(threading.local):
    """The call that a script makes of a patched function.

    Inside a `__torch_function__` mode, and a default device is one, torch looks a method up and calls it once more.
    """

    is_running = False

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function as it was; what is called inside it is not the script's call."""
        self.is_running = True
        try:
            return original(*args, **kwargs)
        finally:
            self.is_running = False


class SharedPatches:
    """Patches that several users share: ranks may be threads of one process.

    The first user installs them, the last one removes them, so that they never come off in the wrong order.
    """

    def __init__(self, install: Callable[[Patches], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._num_users = 0
        self._patches = Patches()

    def acquire(self) -> None:
        """Make sure that the patches are there until `release`."""
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
