"""Command line: `python -m zoo.versions [--only VERSION ...] [--python VERSION ...] [--frameworks] [--demo] [--ci]`.

Without arguments everything is measured, which takes two hours. What was measured is kept in
docs/measured/versions.json, so that single cells can be measured again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from zoo.harness.torches.wheels import IN_CI
from zoo.versions import demo
from zoo.versions.cells import CELLS, measure_cell, run_torch_facing
from zoo.versions.frameworks import FRAMEWORKS, measure_framework
from zoo.versions.page import Measured


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="cells of these versions of torch")
    parser.add_argument("--python", nargs="+", metavar="VERSION", help="cells of these versions of Python")
    parser.add_argument(
        "--frameworks", nargs="*", metavar="NAME", help="frameworks whose name begins with one of these"
    )
    parser.add_argument("--demo", action="store_true", help="`ttrace demo` from the built wheel")
    parser.add_argument("--ci", action="store_true", help=f"only tests of what touches torch, on {IN_CI[0]}")
    chosen = parser.parse_args(arguments)
    if chosen.ci:
        return run_torch_facing(IN_CI[0])
    is_all = not (chosen.only or chosen.python or chosen.demo or chosen.frameworks is not None)
    measured, wrong, total = Measured.read(), 0, 0
    for python, torch in CELLS:
        if is_all or torch in (chosen.only or ()) or python in (chosen.python or ()):
            cell = measured.cells[python, torch] = measure_cell(python, torch)
            print(f"Python {python}, torch {torch}: {cell}", flush=True)
            measured.write()
            total, wrong = total + 1, wrong + (cell.is_supported and not cell.is_good)
    for framework in FRAMEWORKS:
        if is_all or (chosen.frameworks is not None and framework.name.startswith(tuple(chosen.frameworks) or "")):
            outcome = measured.frameworks[framework.name] = measure_framework(framework)
            print(f"{framework.name}: {outcome.examples}", flush=True)
            measured.write()
            total, wrong = total + 1, wrong + bool(outcome.unexpected)
    if is_all or chosen.demo:
        with tempfile.TemporaryDirectory() as folder:
            wheel = demo.build_wheel(Path(folder))
            for python, torch in demo.CELLS:
                result = measured.demos[python, torch] = demo.measure_demo(python, torch, wheel)
                print(result, flush=True)
                measured.write()
                total, wrong = total + 1, wrong + (not result.is_good)
    print(f"versions: {total - wrong} of {total} as they should be (bar: all)")
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
