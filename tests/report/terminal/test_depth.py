"""The strip has a mark for every layer, whatever the errors are."""

from __future__ import annotations

import math
from dataclasses import replace

from ttrace.judge.reason import Reason, Why
from ttrace.judge.verdict import Comparison, Tolerance, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.report.terminal.depth import draw_strip
from ttrace.values.stats import Stats


def test_an_error_beyond_all_measure_has_a_mark() -> None:
    off = Stats(aa=1.0, bb=4.0, ab=2.0, dd=1.0, count=1)
    exact = Comparison(
        TensorId.parse("0/-/layers.0.calls/buffer_after"), Verdict.UNJUDGED, Why(Reason.ZERO), off, Tolerance(0, 0, 0)
    )
    assert math.isinf(exact.excess)
    other = replace(exact, id=TensorId.parse("0/-/layers.1.calls/buffer_after"), stats=Stats())
    assert dict(draw_strip([exact, other], 80))["updates"] == "▇▁"
