"""What was measured of versions: kept as JSON, and written as a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from ttrace.compat.torch import Limit, list_limits
from zoo.harness.torches.environment import ROOT
from zoo.versions import demo
from zoo.versions.cells import CELLS, EXAMPLES, Cell
from zoo.versions.demo import Demo
from zoo.versions.frameworks import FRAMEWORKS, Outcome
from zoo.versions.runs import Example

MEASURED = ROOT / "docs" / "measured" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"


@dataclass
class Measured:
    """Everything that was measured, in the order in which it was last written."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    frameworks: dict[str, Outcome] = field(default_factory=dict)
    demos: dict[tuple[str, str], Demo] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Measured:
        kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"cells": [], "frameworks": [], "demos": []}
        cells = [Cell(**{**row, "failed": tuple(row["failed"])}) for row in kept["cells"]]
        outcomes = [Outcome(**row) for row in kept["frameworks"]]
        demos = [Demo(**row) for row in kept.get("demos", [])]
        return cls(
            {(cell.python, cell.torch): cell for cell in cells},
            {o.framework: o for o in outcomes},
            {(each.python, each.torch): each for each in demos},
        )

    def write(self) -> None:
        """Write the file and the page, in the order in which versions are listed in the code."""
        self.cells = {key: self.cells[key] for key in CELLS if key in self.cells}
        self.frameworks = {f.name: self.frameworks[f.name] for f in FRAMEWORKS if f.name in self.frameworks}
        self.demos = {key: self.demos[key] for key in demo.CELLS if key in self.demos}
        kept = {
            "cells": [asdict(cell) for cell in self.cells.values()],
            "frameworks": [asdict(outcome) for outcome in self.frameworks.values()],
            "demos": [asdict(each) for each in self.demos.values()],
        }
        MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(self.format_page())

    def format_page(self) -> str:
        limits = dict.fromkeys(limit for cell in self.cells.values() for limit in list_limits(cell.torch))
        off = [f"- {_name_range(limit)}: {limit.feature}; {limit.reason}." for limit in limits]
        return _TEXT.format(
            names=" | ".join(f"`{example.name}`" for example in EXAMPLES),
            line="|---" * (3 + len(EXAMPLES)) + "|",
            cells="\n".join(_format_cell(cell) for cell in self.cells.values()),
            limits="\n".join(off),
            frameworks="\n".join(_format_framework(outcome) for outcome in self.frameworks.values()),
            demos="\n".join(_format_demo(each) for each in self.demos.values()),
        )


def _name_range(limit: Limit) -> str:
    below = f"below {'.'.join(map(str, limit.below))}"
    return below.capitalize() if limit.since == (2, 6) else f"Since {'.'.join(map(str, limit.since))}, {below}"


def _format_cell(cell: Cell) -> str:
    tests = f"{cell.passed} passed" + (f", {len(cell.failed)} failed" if cell.failed else "")
    examples = [_format_exit(example, cell.examples.get(example.name, -1), cell.torch) for example in EXAMPLES]
    return f"| {cell.torch} | {cell.python} | {tests} | {' | '.join(examples)} |"


def _format_framework(outcome: Outcome) -> str:
    [framework] = [known for known in FRAMEWORKS if known.name == outcome.framework]
    examples = [
        f"`{example.name}` {_format_exit(example, outcome.examples.get(example.name, -1), outcome.torch)}"
        for example in framework.examples
    ]
    return f"| {outcome.framework} | {outcome.python} | {outcome.torch} | {', '.join(examples)} |"


def _format_demo(each: Demo) -> str:
    result = "both verdicts" if each.is_good else f"**exit {each.exit}**"
    return f"| {each.torch} | {each.python} | {result} | {each.seconds:.0f} |"


def _format_exit(example: Example, status: int, torch: str) -> str:
    text = {0: "passes", 1: "finds it", 2: "off"}.get(status, f"exit {status}")
    return text if status == example.expect(torch) else f"**{text}**"


_TEXT = """# Versions

`.ci/versions` runs all of this and writes this page. The fast tests and the examples ran with each pair of torch and
Python below, on CPU with gloo. An example *passes* if every tensor agrees with the reference, and *finds it* if
`ttrace run` reports the bug. Unexpected results are bold.

| torch | Python | fast tests | {names} |
{line}
{cells}

TTrace supports torch 2.8 to 2.15. With 2.6 and 2.7, everything works except the features below. `ttrace doctor` lists
the limitations of the version that you have:

{limits}

The finding of `fsdp2` in old versions is correct: gloo's `reduce_scatter_tensor` sums where FSDP2 asks for the average,
so gradients are twice as large on two ranks.

## The first minute

`python -m zoo.versions --demo` installs the wheel of a release into a new environment with `pip install`, and runs
`ttrace demo` in an empty folder. Measured on two cores:

| torch | Python | `ttrace demo` | seconds |
|---|---|---|--:|
{demos}

## Frameworks

| framework | Python | torch | examples |
|---|---|---|---|
{frameworks}

megatron-core needs Python 3.12 since 0.17. It runs on CPU with replacements for the parts that need a GPU
([How to check Megatron](../howto/megatron.md)).
"""
