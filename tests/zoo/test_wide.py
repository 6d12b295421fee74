"""Real widths: what is run there, and that the page shows what was measured."""

from __future__ import annotations

import json

from zoo import wide
from zoo.bug import bugs
from zoo.harness.small import Small


def test_there_are_enough_of_both() -> None:
    runs = [wide.Wide(name) for name in wide._known()]
    assert sum(run.bug is None for run in runs) >= 30
    assert sum(run.bug is not None for run in runs) >= wide.NUM_BUGS
    for run in runs:
        assert isinstance(run.case, Small)
        assert run.case.shape.hidden >= 768
        assert run.bug is None or run.bug is bugs()[run.name]


def test_the_page_shows_what_was_measured() -> None:
    known = json.loads(wide.MEASURED.read_text())
    assert known.keys() <= wide._known().keys()
    assert wide.make_page(known) == wide.PAGE.read_text()
    assert all(one["as expected"] for one in known.values())
