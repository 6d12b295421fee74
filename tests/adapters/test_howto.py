"""The page on adapters: its adapter is short, and does what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, blocks
from ttrace.attach import PLAN_VARIABLE
from ttrace.capture.plan import Plan
from ttrace.layouts.placement import LayoutSource
from ttrace.trace.reader import Trace
from zoo.harness.limits import HANG

FILES = {block.title: block.text for block in blocks(ROOT / "docs" / "howto" / "adapter.md") if block.title}


def test_the_adapter_is_short() -> None:
    assert len(FILES["toy_adapter.py"].splitlines()) < 60


def test_the_adapter_states_layouts(tmp_path: Path) -> None:
    """On one rank; tests/test_pages.py runs the page's command on two."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    Plan(out=tmp_path / "trace").save(tmp_path / "plan.json")
    environment = {**os.environ, PLAN_VARIABLE: str(tmp_path / "plan.json")}
    command = [sys.executable, "train_toy.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=HANG)
    records = [shard.record for shards in Trace(tmp_path / "trace").shards.values() for shard in shards]
    stated = {str(record.id): record.layout for record in records if record.source is LayoutSource.ADAPTER}
    assert stated["0/0/0/output"] == "batch out/tp"
    assert stated["0/-/2.weight/param"] == "out in/tp"
    assert stated["0/0/2/grad_input"] == "batch in/tp"
