"""The pytest plugin: the fixture `equivalent`.

Every pytest process loads it wherever TTrace is installed, so it imports nothing of the package until a test asks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture
def equivalent(tmp_path: Path) -> Callable[..., None]:
    """`ttrace.testing.assert_equivalent`, into this test's own folder: `equivalent(train, ranks=2)`."""
    from ttrace.testing.equivalent import assert_equivalent

    return partial(assert_equivalent, out=tmp_path / "ttrace")
