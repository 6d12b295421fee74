"""Writes what the docs take from the code: the table of causes, and the JSON schema of a report.

`python docs/generate.py` writes both. With `--check` it writes nothing, and ends with 1 if one is not up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ttrace.judge.causes.registry import all_causes
from ttrace.judge.verdict import CauseName
from ttrace.report.machine import json_report

REFERENCE = Path(__file__).parent / "reference"
COMMANDS, SCHEMA = REFERENCE / "commands.md", REFERENCE / "report.schema.json"
_SECTION = re.compile("(<!-- causes: [^\n]*-->\n).*?(<!-- end of causes -->)", re.DOTALL)


def main() -> int:
    stale = [path for path, text in generate().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        sys.stdout.write(f"{path} is not up to date\n" if "--check" in sys.argv else f"{path} written\n")
    if "--check" in sys.argv:
        return int(bool(stale))
    for path, text in generate().items():
        path.write_text(text, encoding="utf-8")
    return 0


def generate() -> dict[Path, str]:
    """The text that each file should have."""
    page = COMMANDS.read_text(encoding="utf-8")
    return {
        COMMANDS: _SECTION.sub(lambda found: f"{found[1]}\n{table_of_causes()}\n{found[2]}", page),
        SCHEMA: json.dumps(json_report.build_schema(), indent=2) + "\n",
    }


def table_of_causes() -> str:
    """Every cause with what shows it, in the order of their names in the code."""
    shown: dict[CauseName, list[str]] = {name: [] for name in CauseName}
    for cause in all_causes():
        shown[cause.name].append(cause.shown_by)
    rows = [f"| `{name.value}` | {'; or '.join(texts)} |" for name, texts in shown.items()]
    return "\n".join(["| cause | evidence |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
