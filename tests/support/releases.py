"""Tests of what torch has only since some version."""

from __future__ import annotations

import pytest

from ttrace.compat.torch import RELEASE


def since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skip a test if torch is older; `what` names the feature that torch has since this version."""
    return pytest.mark.skipif((major, minor) > RELEASE, reason=f"torch has {what} since {major}.{minor}")
