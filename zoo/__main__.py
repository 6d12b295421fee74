"""Command line of the zoo: `python -m zoo list`, `run NAME`, `score`, `controls`, `evaluate`, `frameworks`."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from ttrace.judge.verdict import Exit
from zoo import controls
from zoo.bug import Expected, Tier, bugs, entries, story, title
from zoo.evaluation import PAGE, evaluated
from zoo.frameworks.command import measure_frameworks
from zoo.lines import score_lines
from zoo.score import CAUSE_OF_SKETCHES, score, score_sketches
from zoo.seen import Seen
from zoo.watched import evaluate_watched
from zoo.wide import evaluate_wide


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo", description="Known silent bugs, and whether they are found.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all entries: tier, topic, name, title")
    one = commands.add_parser("run", help="describe an entry, run it with and without the bug, and print the result")
    one.add_argument("names", nargs="+", choices=list(entries()), metavar="NAME")
    every = commands.add_parser(
        "score", help="run all reported bugs, each with and without it; exit code 1 below the bars"
    )
    every.add_argument(
        "--tier", choices=list(Tier), help="only these; T4: the typical mistakes, which are not reported"
    )
    every.add_argument("--sketch", action="store_true", help="use sketches of 256 numbers instead of full traces")
    every.add_argument("--by-line", action="store_true", help="whether the wrong line of code is named, instead")
    every.add_argument("--json", action="store_true", help="for programs")
    clean = commands.add_parser(
        "controls", help="run cases that must not be accused; exit code 1 if one is, or its collectives are noted"
    )
    clean.add_argument("--all", action="store_true", help="more than 200 of them, instead of a few")
    clean.add_argument("--json", action="store_true", help="for programs")
    whole = commands.add_parser(
        "evaluate", help="run score, controls and fixed tolerances, and write docs/evaluation.md"
    )
    whole.add_argument("--wide", action="store_true", help="controls and bugs at real widths instead, and their page")
    whole.add_argument("--watched", action="store_true", help="entries without a reference instead, and their page")
    whole.add_argument("--only", nargs="+", default=[], metavar="NAME", help="with --wide: names that begin so")
    frameworks = commands.add_parser(
        "frameworks", help="check scripts of frameworks, and write docs/reference/frameworks.md"
    )
    frameworks.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="rows whose name begins with one of these"
    )
    chosen = parser.parse_args(arguments)
    known = {
        "list": _list,
        "run": _run,
        "score": _score,
        "controls": _controls,
        "evaluate": _evaluate,
        "frameworks": _frameworks,
    }
    command = known[chosen.command]
    return command(chosen)


def _list(_chosen: argparse.Namespace) -> int:
    for name, bug in entries().items():
        paper = f"paper {bug.paper}" if bug.paper else ""
        print(f"{bug.tier}  {paper:8}  {bug.topic:22}  {name:34}  {title(name)}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    result = score(chosen.names)
    for line in result.lines:
        expected = line.bug.expected
        origin = f"{line.bug.package}: {' '.join(line.bug.sources)}" if line.bug.sources else "not reported"
        print(f"{line.name}\n\n{story(line.name)}\n\n{line.bug.tier}, {origin}")
        print(f"expected  {_name(expected)}")
        print(f"found     {_name(line.broken)}")
        print(f"          {line.broken.sentence or line.broken.trouble or 'the run with the bug passed'}")
        print(f"without   {'passed' if line.clean.exit is Exit.PASSED else line.clean.trouble}\n")
    return 0 if all(line.is_explained and line.is_clean for line in result.lines) else 1


def _name(finding: Expected | Seen) -> str:
    if not finding.cause:
        return "nothing"
    return f"{finding.module}/{finding.kind}: {finding.cause} {finding.axis or ''}".rstrip()


def _score(chosen: argparse.Namespace) -> int:
    known = entries() if chosen.tier else bugs()
    names = [name for name, bug in known.items() if chosen.tier in (None, bug.tier)]
    if chosen.by_line:
        return score_lines(_tell)
    if chosen.sketch:
        return _score_sketches(names, as_json=chosen.json)
    result = score(names, _tell)
    print(json.dumps(result.as_json(), indent=1) if chosen.json else result)
    return 0 if result.passes else 1


def _score_sketches(names: list[str], *, as_json: bool) -> int:
    alone, result = score_sketches(names, _tell)
    share_alone, share = (found.share(lambda line: line.is_explained) for found in (alone, result))
    print(
        json.dumps({**result.as_json(), "cause_from_sketches": round(share_alone, 4)}, indent=1) if as_json else result
    )
    if not as_json:
        print(f"sketches: {share_alone:.0%} of the causes, {share:.0%} with a second run where they show none")
    is_enough = all(line.is_detected and line.is_clean for line in result.lines) and share >= CAUSE_OF_SKETCHES
    return 0 if is_enough else 1


def _controls(chosen: argparse.Namespace) -> int:
    result = controls.run(controls.every() if chosen.all else controls.few(), _tell)
    print(json.dumps(result.as_json(), indent=1) if chosen.json else result)
    return 1 if result.accused or result.noted else 0


def _evaluate(chosen: argparse.Namespace) -> int:
    if chosen.wide:
        return evaluate_wide(chosen.only, _tell)
    if chosen.watched:
        return evaluate_watched(_tell)
    found = evaluated(_tell)
    PAGE.write_text(found.page())
    print(f"{found.score}\n{found.clean}\n{PAGE}")
    return 0 if found.passes else 1


def _frameworks(chosen: argparse.Namespace) -> int:
    return measure_frameworks(chosen.only)


def _tell(words: str) -> None:
    print(words, file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
