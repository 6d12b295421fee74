"""Writes what the docs take from the code: the table of causes, the Python names, and the JSON schema of a report.

`python docs/generate.py` writes all. With `--check` it writes nothing, and ends with 1 if one is not up to date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

import ttrace
import ttrace.testing
from ttrace.cli import app
from ttrace.cli.options import PANELS
from ttrace.judge.causes.search import all_causes
from ttrace.judge.verdict import CauseName
from ttrace.report.machine import json_report

REFERENCE = Path(__file__).parent / "reference"
COMMANDS, SCHEMA, API = REFERENCE / "commands.md", REFERENCE / "report.schema.json", REFERENCE / "api.md"
NAMES = {
    "Training scripts": ("attach", "Session", "watch", "Monitor", "Disagreement", "TraceSchedule"),
    "Results": ("check",),
    "Large references": ("streamed", "pipelined"),
    "Layouts": ("holds", "split", "Layout", "Mesh"),
    "Tests": ("testing.assert_equivalent",),
    "Errors": ("TTraceError", "LayoutError", "CaptureError", "TraceError", "DisagreementError"),
}
"""The public names, in the order of the page; `__version__` has no docstring, and is described on the page."""
METHODS = {
    "Session": ("session", "step batch close"),
    "Monitor": ("monitor", "check close"),
    "Disagreement": ("disagreement", ""),
    "Layout": ("Layout", "parse"),
    "Mesh": ("Mesh", "of parse"),
}
"""Of a class, how the page calls its objects, and the methods to show."""
HOW_TO = {
    "attach": "../howto/annotate.md",
    "watch": "../howto/watch.md",
    "streamed": "../howto/large-references.md",
    "pipelined": "../howto/large-references.md",
    "holds": "notation.md#rows-that-depend-on-the-data",
    "split": "../howto/parallelism.md",
    "Layout": "notation.md",
    "testing.assert_equivalent": "../howto/ci.md#in-your-own-tests",
}


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
    return {
        COMMANDS: fill_section(
            fill_section(COMMANDS.read_text(encoding="utf-8"), "causes", table_of_causes()),
            "options",
            "\n".join(describe_options()),
        ),
        API: fill_section(API.read_text(encoding="utf-8"), "names", "\n".join(describe_names())),
        SCHEMA: json.dumps(json_report.build_schema(), indent=2) + "\n",
    }


def fill_section(page: str, name: str, text: str) -> str:
    """The page with this text between the two comments that name the section."""
    section = re.compile(f"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    return section.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", page)


def describe_names() -> Iterator[str]:
    """Every public name with its signature and docstring."""
    missing = set(ttrace.__all__) - {name for names in NAMES.values() for name in names} - {"__version__"}
    assert not missing, f"{missing} must be added to NAMES"
    for group, names in NAMES.items():
        yield f"## {group}\n"
        for name in names:
            thing: Any = ttrace
            for part in name.split("."):
                thing = getattr(thing, part)
            is_call = not (inspect.isclass(thing) and (name in METHODS or issubclass(thing, Exception)))
            yield f"### `ttrace.{name}`\n"
            if is_call:
                yield f"```python\nttrace.{name}{format_signature(thing)}\n```\n"
            yield f"{inspect.getdoc(thing)}\n"
            owner, methods = METHODS.get(name, ("", ""))
            for method in methods.split():
                function = getattr(thing, method)
                yield f"`{owner}.{method}{format_signature(function)}`\n:   {indent(inspect.getdoc(function))}\n"
            if name in HOW_TO:
                yield f"[More]({HOW_TO[name]}).\n"


def format_signature(function: Callable[..., object]) -> str:
    """The arguments with their defaults, without types."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.name != "self"]
    plain = [each.replace(annotation=each.empty) for each in own]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def indent(text: str | None) -> str:
    return (text or "").replace("\n", "\n    ").replace("    \n", "\n")


def describe_options() -> Iterator[str]:
    """The options of `ttrace run` by panel, with the other commands that have the same ones."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group, as the app has commands
    others = {
        name: [(param.opts, param.rich_help_panel, param.help) for param in commands[name].params]
        for name in ("trace", "sweep", "check")
    }
    for panel in PANELS:
        yield f"### {panel}\n\n| option | what it does | also in |\n|---|---|---|"
        for param in commands["run"].params:
            if param.rich_help_panel == panel:
                declared = " / ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
                default = f" Default: {param.default}." if param.default and not param.is_flag else ""
                known = (param.opts, param.rich_help_panel, param.help)
                takers = ", ".join(f"`{name}`" for name, params in others.items() if known in params)
                yield f"| {declared} | {param.help}{default} | {takers} |"
        yield ""


def table_of_causes() -> str:
    """Every cause with what shows it, in the order of their names in the code."""
    shown: dict[CauseName, list[str]] = {name: [] for name in CauseName}
    for cause in all_causes():
        shown[cause.name].append(cause.shown_by)
    rows = [f"| `{name.value}` | {'; or '.join(texts)} |" for name, texts in shown.items()]
    return "\n".join(["| cause | evidence |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
