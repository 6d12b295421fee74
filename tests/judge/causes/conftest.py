"""Every cause is found as well in a tensor that is read in many blocks."""

from __future__ import annotations

import pytest

from ttrace.judge.tensors import values


@pytest.fixture(autouse=True, params=[values.BLOCK, 24])
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BLOCK", request.param)
