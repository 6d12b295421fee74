"""Cache of a check's results in a file, lot by lot, for the next check of the same traces.

Results are JSON and are read back by the types that the work states: nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch

from ttrace.judge.engine import Lot, Work
from ttrace.trace.format import DTYPE_NAMES, DTYPES
from ttrace.trace.seal import sum_of
from ttrace.untrusted import read_file


class ResultCache:
    """Results of lots, in a folder. Each process appends to a file of its own and reads all of them."""

    def __init__(self, folder: Path, name: str, work: Work[Any, Any], identity: str) -> None:
        """`identity` differs as soon as the work would be done on other traces, or otherwise."""
        self.folder = folder
        self._name = name
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._type = get_type_hints(work)["return"]
        self._lines = _read_lines(folder)

    def find(self, lot: Lot) -> list[Any] | None:
        """Return the results of a lot, or None; a line that was cut off or has changed counts as missing."""
        try:
            seal, _, text = self._lines[self._key(lot.ids)].partition(" ")
            return list(rebuild(self._type, json.loads(text))) if seal == sum_of(text.encode()) else None
        except (KeyError, ValueError, TypeError):
            return None

    def add(self, lot: Lot, results: list[Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(self.folder / self._name, flags, 0o666), "a", encoding="utf-8") as file:
            text = json.dumps(to_json(results))
            file.write(f"{self._key(lot.ids)} {sum_of(text.encode())} {text}\n")

    def _key(self, ids: Sequence[Any]) -> str:
        return hashlib.sha256("\n".join([str(self._type), self._identity, *map(str, ids)]).encode()).hexdigest()[:32]


def to_json(value: Any) -> Any:
    """Turn a result into what JSON can hold: a dataclass or a named tuple becomes the list of its fields."""
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value):
        return [to_json(getattr(value, field.name)) for field in fields(value)]
    return value


def rebuild(kind: Any, value: Any) -> Any:
    """Make a result of this type again from what `to_json` returned."""
    arguments = get_args(kind)
    if value is None:
        return None
    if get_origin(kind) is UnionType:
        (kind,) = (each for each in arguments if each is not type(None))
        return rebuild(kind, value)
    if get_origin(kind) is list:
        return [rebuild(arguments[0], each) for each in value]
    if get_origin(kind) is tuple:
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(rebuild(each, item) for each, item in zip(kinds, value, strict=True))
    if kind is torch.dtype:
        return DTYPES[value]
    if kind is bytes:
        return bytes.fromhex(value)
    if is_dataclass(kind) or issubclass(kind, tuple):
        types, made = get_type_hints(kind), cast("Any", kind)
        names = [field.name for field in fields(kind)] if is_dataclass(kind) else made._fields
        return made(**{name: rebuild(types[name], item) for name, item in zip(names, value, strict=True)})
    return kind(value) if issubclass(kind, Enum) else value


def _read_lines(folder: Path) -> dict[str, str]:
    lines = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_file(path).decode(errors="replace").splitlines():
            key, _, rest = line.partition(" ")
            lines[key] = rest
    return lines
