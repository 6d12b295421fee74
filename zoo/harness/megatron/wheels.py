"""The versions of megatron-core that tests run or read.

`numpy` and `packaging`, which our own tools need too, are all that these wheels use here.
`python -m zoo.harness.megatron.wheels` downloads all of them, so that no test has to wait.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zoo.harness.wheels import unpack

NEWEST = "0.16.1"
"""The last one for Python 3.11."""

TESTED = (
    "0.5.0",
    "0.6.0",
    "0.7.0",
    "0.8.0",
    "0.9.0",
    "0.10.0",
    "0.11.0",
    "0.12.3",
    "0.13.0",
    "0.14.0",
    "0.15.3",
    NEWEST,
)


def wheel(version: str = NEWEST) -> Path:
    """The folder to put on `sys.path`, downloaded unless it is there."""
    return unpack(f"megatron-core=={version}", f"megatron-core-{version}-{sys.implementation.cache_tag}")


if __name__ == "__main__":
    for tested in TESTED:
        print(wheel(tested))
