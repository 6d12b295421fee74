"""Call of a test's function, in a file for the processes that make it."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrace.errors import TTraceError

Function = Callable[..., object]


@dataclass(frozen=True)
class FunctionCall:
    """A function of a module's top level by name, its arguments, and where its module is found."""

    module: str
    file: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: tuple[str, ...]
    """Where modules are looked for: pytest adds folders to it."""

    @classmethod
    def of(cls, function: Function, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> FunctionCall:
        name = getattr(function, "__qualname__", "")
        file = getattr(sys.modules.get(function.__module__), "__file__", None)
        if not name.isidentifier() or file is None:
            raise TTraceError(
                f"{name or function} cannot be called in other processes. Give a function of a module's top level; "
                "what it needs goes into args and kwargs."
            )
        return cls(function.__module__, file, name, tuple(args), dict(kwargs or {}), tuple(sys.path))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(pickle.dumps(self))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TTraceError(f"the arguments of {self.name} cannot be sent to other processes: {error}.") from None

    def make(self) -> None:
        """Make the call in this process."""
        getattr(self._import_module(), self.name)(*self.args, **self.kwargs)

    def _import_module(self) -> Any:
        """Import the module by its name, or from its file if pytest imported it in another way."""
        try:
            module = importlib.import_module(self.module)
            if getattr(module, "__file__", None) == self.file:
                return module
        except ImportError:
            pass
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def load_call(path: Path) -> FunctionCall:
    """Load a call that the same user's test saved, and make its modules importable."""
    call: FunctionCall = pickle.loads(path.read_bytes())
    sys.path[:] = dict.fromkeys([*sys.path, *call.path])
    return call
