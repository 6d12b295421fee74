"""Which files are the script's: those that its author can change, not torch's, TTrace's or Python's own."""

from __future__ import annotations

import os
import site
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120  # beginnings of texts are compared
OWN = str(Path(__file__).parents[1]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{path}{os.sep}" for path in (*site.getsitepackages(), sysconfig.get_path("purelib")))


def find_line(function: Any) -> str:
    """Find the file and line where a function is defined; empty for one that is not written in Python."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


@cache
def is_of_script(path: str) -> bool:
    """Whether a file is neither torch's nor TTrace's nor Python's own, and no code that a program generated.

    `typing_extensions` wraps functions of torch that are deprecated.
    """
    if path.startswith((TORCH, OWN, "<")) or "torchinductor_" in path or path.endswith("typing_extensions.py"):
        return False
    return path.startswith(_INSTALLED) or not path.startswith(_STANDARD)
