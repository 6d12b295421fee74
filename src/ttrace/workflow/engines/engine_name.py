"""Names of the engines, in a module that imports no torch: the help of `ttrace check` lists them."""

from __future__ import annotations

import os
from typing import Literal

EngineName = Literal["threads", "processes", "torchrun", "ray"]


def is_reporter(name: EngineName) -> bool:
    """Whether this process reports the result: of the ranks of a torchrun job only the first does."""
    return name != "torchrun" or os.environ.get("RANK", "0") == "0"
