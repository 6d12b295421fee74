"""Stages of one launch are told as their traces begin."""

from __future__ import annotations

import time
from pathlib import Path

from ttrace.workflow.stage_watch import watch_stages
from zoo.harness.limits import HANG


def begin_trace(out: Path) -> None:
    (out / "rank-00000").mkdir(parents=True)
    (out / "rank-00000" / "manifest.json").touch()


def test_stages_are_told_in_order_as_their_traces_begin(tmp_path: Path) -> None:
    stages = {name: tmp_path / name for name in ("echo", "twin 1/2", "twin 2/2")}
    names: list[str] = []
    with watch_stages(stages, names.append):
        for number, name in enumerate(list(stages)[:2], 1):
            begin_trace(stages[name])
            deadline = time.monotonic() + HANG
            while len(names) < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert names == ["echo", "twin 1/2"]
    begin_trace(stages["twin 2/2"])
    time.sleep(0.3)
    assert len(names) == 2  # nobody watches any more
