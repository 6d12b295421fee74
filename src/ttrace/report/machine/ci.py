"""Output for CI: annotations and a summary for GitHub Actions, and JUnit XML, which every CI system shows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ttrace.errors import TTraceError
from ttrace.judge.verdict import Exit, Finding, Judgement
from ttrace.report.facts import PASSED, SYMBOLS, group_alike, list_facts, make_headline, shorten_place
from ttrace.untrusted import clean_line, clean_text, write_named

_MOST_ANNOTATIONS = 10
"""GitHub shows at most ten errors of a step."""


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get("GITHUB_ACTIONS") == "true"


def format_errors(findings: Sequence[Finding], root: Path) -> Iterator[str]:
    """Format findings as workflow commands, one for all modules that are wrong in the same way."""
    for first, *others in group_alike(findings)[:_MOST_ANNOTATIONS]:
        site, rest = make_headline(first, first=first is findings[0])
        text = "\n".join([f"{site} {rest}", *(f"{label} {fact}".strip() for label, fact in list_facts(first, others))])
        title = _escape_property(f"ttrace: {first.cause.name.value}")
        line = _format_place(first.operation.source, root) if first.operation is not None else ""
        yield f"::error {line or _format_place(first.source, root)}title={title}::{_escape_data(text)}"


def format_summary(judgement: Judgement, title: str) -> str:
    """Format the verdict and the findings as Markdown."""
    lines = [f"### {SYMBOLS[judgement.exit]} TTrace: {_quote_code(title)}", ""]
    if judgement.exit is Exit.PASSED:
        lines.append(f"{len(judgement.comparisons)} tensors: {PASSED}.")
    for first, *others in group_alike(judgement.findings):
        site, rest = make_headline(first, first=first is judgement.findings[0])
        lines += [f"**{_quote_code(site)}** {_escape_html(rest)}", ""]
        lines += [f"- {label or 'and'}: {_quote_code(fact)}" for label, fact in list_facts(first, others)]
        lines.append("")
    lines += [f"- {_quote_code(problem)}" for problem in judgement.problems]
    return "\n".join(lines) + "\n"


def format_sweep(condition: str, counts: str, code: Exit) -> str:
    """Format the result of a sweep as Markdown: when it fails, and how many cells there are."""
    lines = [
        f"### {SYMBOLS[code]} TTrace sweep",
        "",
        *([_quote_code(condition), ""] if condition else []),
        f"{counts}.",
    ]
    return "\n".join(lines) + "\n\n"


def add_summary(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Append to the step's summary, if there is one."""
    path = environment.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def _format_place(source: str, root: Path) -> str:
    """Locate a line of code; GitHub knows files only by their path in the repository."""
    file, _, line = shorten_place(source, root).rpartition(":")
    return f"file={_escape_property(file)},line={line}," if file and line.isdigit() else ""


def _escape_data(text: str) -> str:
    return clean_text(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _escape_html(text: str) -> str:
    return clean_line(text).replace("&", "&amp;").replace("<", "&lt;")


def _quote_code(text: str) -> str:
    """Quote a text, so that Markdown and HTML in it have no effect."""
    text = clean_line(" ".join(text.split()))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}"


@dataclass(frozen=True)
class Case:
    """One run that was judged, and its result: in one line and in full."""

    name: str
    exit: Exit
    message: str = ""
    text: str = ""
    seconds: float = 0.0


def write(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write the cases: a run with findings is a failure, a run that could not be judged an error."""
    try:
        write_named(path, format_junit(suite, cases))
    except OSError as error:
        raise TTraceError(f"{path} cannot be written: {error}. Choose another --junit.") from None


def format_junit(suite: str, cases: Sequence[Case]) -> str:
    counts = {
        "tests": len(cases),
        "failures": sum(case.exit is Exit.FOUND for case in cases),
        "errors": sum(case.exit is Exit.UNJUDGED for case in cases),
    }
    root = ElementTree.Element("testsuites")
    numbers = {name: str(count) for name, count in counts.items()}
    parent = ElementTree.SubElement(root, "testsuite", {"name": clean_text(suite), **numbers})
    for case in cases:
        _add_case(parent, suite, case)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _add_case(parent: ElementTree.Element, suite: str, case: Case) -> None:
    known = {"classname": clean_text(suite), "name": clean_text(case.name), "time": f"{case.seconds:.3f}"}
    element = ElementTree.SubElement(parent, "testcase", known)
    if case.exit is not Exit.PASSED:
        kind = "failure" if case.exit is Exit.FOUND else "error"
        ElementTree.SubElement(element, kind, message=clean_text(case.message)).text = clean_text(case.text)
