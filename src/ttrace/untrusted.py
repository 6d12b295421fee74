"""Limits of what a file may hold: somebody else's trace must not take all memory, or forever.

`--limits 10`, or TTRACE_LIMITS=10, makes all of them ten times as large. docs/explanation/security.md tells of them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ttrace.errors import TTraceError
from ttrace.free_memory import find_free_memory

LIMITS_VARIABLE = "TTRACE_LIMITS"
MOST = (1 << 63) - 1
"""The largest number in a trace: what torch and safetensors can count."""


@dataclass(frozen=True)
class Limits:
    """How large what is read may be."""

    document_bytes: int = 256 << 20
    """A JSON document: a manifest, an end, an index, a report."""
    settings_bytes: int = 4 << 20
    """A file that people write: rules, a policy, a sweep, a map of names, a baseline."""
    lines_bytes: int = 4 << 30
    """The records, or the collectives, of one rank."""
    depth: int = 100
    """How deep lists and tables lie in each other."""
    digits: int = 400
    """How many digits a number has."""
    num_ranks: int = 1 << 20
    """The ranks of a run."""

    @classmethod
    def get(cls) -> Limits:
        """Return the limits of this process."""
        return _make(os.environ.get(LIMITS_VARIABLE, "1"))


@lru_cache(maxsize=8)
def _make(factor: str) -> Limits:
    if not (factor.isascii() and factor.isdecimal() and 0 < len(factor) < 7 and int(factor)):
        raise TTraceError(f"{LIMITS_VARIABLE}={factor}: it must be a whole number of at least 1, for instance 10.")
    return Limits(**{name: limit * int(factor) for name, limit in vars(Limits()).items()})


def refuse_more(where: object, what: str, found: int, most: int) -> None:
    """Refuse what is beyond a limit, and say how to raise it."""
    if found > most:
        raise TTraceError(
            f"{where}: {what} is {found:,}, but at most {most:,} is read. If you trust it: ttrace --limits 10, or "
            f"{LIMITS_VARIABLE}=10."
        )


def check_memory(what: object, num_bytes: int) -> None:
    """Refuse to make values that this machine's memory cannot hold: a few bytes of a trace can ask for any number."""
    free = find_free_memory()
    if free is not None and num_bytes > free:
        raise TTraceError(
            f"{what}: its values take {num_bytes / 2**30:,.1f} GiB, but only {free / 2**30:,.1f} GiB of memory is "
            "free. Use a larger machine, or trace again with --record sketch."
        )


def parse_json(text: str, where: object) -> Any:
    """Parse a JSON document of others; raise ValueError or TTraceError if it is none, or beyond the limits."""
    limits = Limits.get()
    refuse_more(where, "its size in bytes", len(text), limits.document_bytes)
    try:
        found = json.loads(text, parse_int=lambda digits: _parse_int(digits, limits))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(found, where, limits)
    return found


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """Parse a TOML file of others; raise ValueError or TTraceError if it is none, or beyond the limits."""
    limits = Limits.get()
    refuse_more(where, "its size in bytes", len(text), limits.settings_bytes)
    # Keys such as a.a.a.a make tables in tables.
    longest = max((line.count(".") + line.count("[") for line in text.splitlines()), default=0)
    if longest > 100 * limits.depth:
        raise ValueError("it is nested too deeply")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(found, where, limits)
    return found


def _parse_int(digits: str, limits: Limits) -> int:
    if len(digits) > limits.digits:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _check_depth(found: Any, where: object, limits: Limits) -> None:
    """Refuse what lies too deep, level by level: a function that calls itself would end in a RecursionError."""
    level, depth = [found], 0
    while level:
        refuse_more(where, "its depth", depth, limits.depth)
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, (Mapping, list))
            for inner in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(inner, (Mapping, list))
        ]
