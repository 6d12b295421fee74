"""Command line that runs one bench by name: `python -m bench layout`; without a name it lists them.

If a bench can measure more than fits into a minute or two, `--all` does it: `python -m bench calibration --all`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

WITH_OPTIONS = ("calibration", "damage", "many", "soak", "streamed", "watch")


def names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[!_]*.py"))


def main(arguments: list[str]) -> int:
    if not arguments:
        print("\n".join(names()))
        return 0
    # Some benches have options of their own.
    is_known = arguments[1:] in ([], ["--all"]) or arguments[0] in WITH_OPTIONS
    if arguments[0] not in names() or not is_known:
        print(f"{' '.join(arguments)!r} is not a bench. Known: {', '.join(names())}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{arguments[0].replace('-', '_')}")
    return int(module.main(*arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
