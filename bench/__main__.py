"""This module runs one bench by name: `python -m bench layout`; without a name it lists them.

What follows the name is the bench's own: `python -m bench calibration --quick`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[!_]*.py"))


def main(arguments: list[str]) -> int:
    if not arguments:
        print("\n".join(names()))
        return 0
    if arguments[0] not in names() or any(option != "--quick" for option in arguments[1:]):
        print(f"{' '.join(arguments)!r} is no bench. Known: {', '.join(names())}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{arguments[0].replace('-', '_')}")
    return int(module.main(*arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
