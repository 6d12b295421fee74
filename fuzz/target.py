"""Targets: what takes a hostile input, and where it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
"""Inputs that are kept, a folder for each target: valid ones to start from, and each that once failed."""

Mutate = Callable[[bytes, Random], bytes]
"""Returns another input that is like this one."""


@dataclass(frozen=True)
class Target:
    """Code that reads what others wrote. It may refuse it with a TTraceError, and with nothing else."""

    name: str
    run: Callable[[bytes], object]
    mutate: Mutate | None = None
    """Changes that keep an input's form, so that more of them get past the first check; None for changes of bytes."""
    words: tuple[str, ...] = ()
    """Words of the language that is read."""
    make_seeds: Callable[[], Iterable[bytes]] = tuple
    """Makes valid inputs, besides those in the corpus."""
    max_bytes: int = 8192
    usual_bytes: int = 256
    """Most inputs are not longer."""


TEXTS = ("notation", "ids", "mesh", "expression", "rules", "plan", "sweep-file", "policy", "baseline")
OTHERS = {
    "lines": "documents",
    "manifest": "documents",
    "end": "documents",
    "reader": "traces",
    "page": "pages",
}
PLANTED = ("planted-error", "planted-delay", "planted-memory", "planted-death")
"""Targets that fail on purpose, to show that a failure is noticed; not part of --all."""
MODULES = {**dict.fromkeys(TEXTS, "texts"), **OTHERS, **dict.fromkeys(PLANTED, "planted")}
"""By target, the module that has it."""
NAMES = (*TEXTS, *OTHERS)


def load_target(name: str) -> Target:
    """Import a target, with all that it reads with."""
    found: dict[str, Target] = {each.name: each for each in importlib.import_module(f"fuzz.{MODULES[name]}").TARGETS}
    return found[name]
