"""JUnit XML, which every CI system shows: a case for each run that was judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ttrace.errors import TTraceError
from ttrace.files import write_named
from ttrace.judge.verdict import Exit
from ttrace.text import clean_text


@dataclass(frozen=True)
class Case:
    """One run, and how it ended: in one line and in full."""

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
