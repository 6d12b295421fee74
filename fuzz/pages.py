"""The HTML report: whatever names, notes and values say, a page has the tags and attributes of a harmless one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from random import Random

from fuzz.container import write_files
from fuzz.documents import COLLECTIVE, MANIFEST
from fuzz.mutation import mutate_text
from fuzz.target import Target
from fuzz.traces import write_run
from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Cause, CauseName, Comparison, Exit, Finding, Judgement, RegionError, Tolerance, Verdict
from ttrace.layouts.ids import Kind, TensorId, encode_name
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.report.page.contents import About, Side, build_page
from ttrace.report.page.document import render_document
from ttrace.report.sweep import SweepRow, SweepTable, render_page
from ttrace.trace.format import ModuleInfo
from ttrace.trace.reader import Trace
from ttrace.values.stats import Stats

_HARMLESS = "a harmless text"
_FLOATS = (0.0, 1.0, -1.0, 1e-300, 1e300, math.inf, math.nan, 0.5)
_STEPS = (0, 1, 2**31 - 1, 2**31, 10**18 - 1)
_WORDS = (
    *("<script>alert(1)</script>", "</script>", "<!--", "-->", "<img src=x onerror=alert(1)>", "]]>", "{{PAGE}}", "}}"),
    *(
        "'",
        '"',
        "\\",
        "&lt;",
        "&#60;",
        "\u2028",
        "\u2029",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "</style>",
        "<svg/onload=a()>",
    ),
    *("javascript:alert(1)", "\n", "` onclick=`", "%3Cscript%3E", "\\u003cscript>", "<ScRiPt\t>", "<?", "<![CDATA["),
)


class _Tags(HTMLParser):
    """The tags of a page, each with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.others: list[str] = []
        """Comments, declarations and the like: a page has few of them, and always the same."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", ()))

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def handle_decl(self, decl: str) -> None:
        self.others.append(decl)

    def handle_pi(self, data: str) -> None:
        self.others.append(data)

    def unknown_decl(self, data: str) -> None:
        self.others.append(data)


def _run(data: bytes) -> None:
    texts = data.decode("utf-8", "surrogateescape").split("\n") or [""]
    for render, harmless in ((_render_report, _find_tags_of_report()), (_render_sweep, _find_tags_of_sweep())):
        page = render(texts)
        if _find_tags(page) != harmless:
            raise AssertionError(f"the page of {render.__name__} has other tags than that of harmless texts")


def _find_tags(page: str) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    parser = _Tags()
    parser.feed(page)
    parser.close()
    return parser.tags, parser.others


@cache
def _find_tags_of_report() -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    return _find_tags(_render_report([_HARMLESS]))


@cache
def _find_tags_of_sweep() -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    return _find_tags(_render_sweep([_HARMLESS]))


def _render_report(texts: list[str]) -> str:
    words, numbers = cycle(texts), Random(repr(texts))
    judgement = Judgement(
        tuple(comparisons := [_make_comparison(words, numbers, verdict) for verdict in Verdict]),
        (_make_finding(comparisons[1], words),),
        (next(words),),
        (next(words), next(words)),
    )
    sides = {role: Side(next(words), next(words), next(words)) for role in ("reference", "candidate")}
    seconds = {next(words): numbers.choice((0.0, 1.5))}
    return render_document(build_page(judgement, About(next(words), next(words), sides, seconds, _take_traces(words))))


def _make_comparison(words: Iterator[str], numbers: Random, verdict: Verdict) -> Comparison:
    """Make a comparison with these texts; names and slots are encoded, as capture encodes them."""
    name, slot = (encode_name(next(words)[:50]) or "." for _ in range(2))
    floats = [numbers.choice(_FLOATS) for _ in range(5)]
    return Comparison(
        TensorId.of(
            numbers.choice(_STEPS), None, name, numbers.choice(list(Kind)), slot=slot, call=numbers.choice(_STEPS)
        ),
        verdict,
        Why(numbers.choice(list(Reason)), names=(next(words),), text=next(words), side=next(words), value=floats[0]),
        Stats(6, abs(floats[1]), abs(floats[2]), abs(floats[3]), floats[4]),
        _draw_tolerance(verdict, numbers),
        (RegionError((0,), floats[0]),),
        layout=next(words),
        by=Provenance(LayoutSource.RULE, next(words)),
        suggestion=next(words),
    )


def _draw_tolerance(verdict: Verdict, numbers: Random) -> Tolerance | None:
    """Draw a tolerance; what is wrong was measured, so it always has one, and floors are those of dtypes."""
    if not verdict.is_wrong and numbers.random() < 0.2:
        return None
    value, twins = abs(numbers.choice(_FLOATS)), abs(numbers.choice(_FLOATS))
    return Tolerance(value, twins, numbers.choice((0.0, 6e-8, 0.004)))


def _make_finding(comparison: Comparison, words: Iterator[str]) -> Finding:
    cause = Cause(CauseName.UNEXPLAINED, next(words), next(words), (next(words), next(words)))
    return Finding(comparison, next(words), next(words), cause, 1)


def _take_traces(words: Iterator[str]) -> tuple[Trace, Trace]:
    """Take two traces whose manifests and ledgers have these texts."""
    traces = _open_traces()
    for trace in traces:
        for rank in trace.ranks:
            rank.manifest = MANIFEST.model_copy(
                update={
                    "role": next(words),
                    "mesh": next(words),
                    "modules": {".": ModuleInfo(type=next(words), source=next(words))},
                    "versions": {next(words): next(words)},
                }
            )
            changes = {"module": next(words), "op": next(words), "source": next(words), "dtype": next(words)}
            rank.__dict__["collectives"] = (COLLECTIVE.model_copy(update=changes),)
    return traces


@cache
def _open_traces() -> tuple[Trace, Trace]:
    with tempfile.TemporaryDirectory() as scratch:
        write_files(write_run(Path(scratch) / "written"), Path(scratch) / "run", {})
        traces = Trace(Path(scratch) / "run" / "reference"), Trace(Path(scratch) / "run" / "candidate")
        for trace in traces:
            _ = trace.mesh, trace.shards  # while the files are there
        return traces


def _render_sweep(texts: list[str]) -> str:
    words = cycle(texts)
    row = SweepRow(next(words), {next(words): next(words)}, Exit.FOUND, 1.0, next(words), next(words), next(words))
    passed = replace(row, values={next(words): True}, exit=Exit.PASSED, name=f"other {next(words)}")
    return render_page(SweepTable((row, passed), 1, next(words) or "always", (row.name,)))


def _mutate(data: bytes, random: Random) -> bytes:
    text = data.decode("utf-8", "surrogateescape")
    return mutate_text(text, _WORDS, random).encode("utf-8", "surrogatepass")


def _make_seeds() -> Iterable[bytes]:
    for count in (1, 3, len(_WORDS)):
        yield "\n".join(_WORDS[:count]).encode("utf-8", "surrogatepass")


TARGETS = (Target("page", _run, _mutate, _WORDS[:8], make_seeds=_make_seeds, usual_bytes=600),)
