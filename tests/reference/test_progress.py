"""A long step says how far it is, and not more often than it should."""

from __future__ import annotations

import time

from ttrace.reference.progress import StreamProgress


def test_a_step_says_its_share_and_the_time_left() -> None:
    said: list[str] = []
    progress = StreamProgress(100, say=said.append, interval=0.0)
    time.sleep(0.01)
    progress.on_read(60)
    progress.on_gradient(30)
    assert said[0].startswith("ttrace: streamed 20% of the step, about 0 s left")
    assert said[1].startswith("ttrace: streamed 40% of the step")


def test_a_short_step_says_nothing() -> None:
    said: list[str] = []
    progress = StreamProgress(100, say=said.append)
    for _ in range(100):
        progress.on_read(1)
    assert said == []


def test_each_step_begins_at_nothing() -> None:
    said: list[str] = []
    progress = StreamProgress(100, 2, said.append, interval=0.0)
    for _ in range(2 * 2):
        progress.on_read(100)
        progress.on_gradient(100)
    shares = [int(line.split()[2].rstrip("%")) for line in said]
    assert shares == [17, 50, 67, 100] * 2
