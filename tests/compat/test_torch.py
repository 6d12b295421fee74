"""Limits of older versions of torch are known by number."""

from __future__ import annotations

import pytest

from ttrace.compat.torch import LIMITS, list_limits, parse_release


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.6.0", (2, 6)),
        ("2.13.0+cpu", (2, 13)),
        ("2.10.0a0+b558c986e8.nv25.11", (2, 10)),
        ("unknown", (0, 0)),
    ],
)
def test_every_form_of_a_version_is_read(version: str, release: tuple[int, int]) -> None:
    assert parse_release(version) == release


def test_a_limit_ends_with_the_version_that_it_names() -> None:
    for limit in LIMITS:
        major, minor = limit.below
        assert limit in list_limits(f"{major}.{minor - 1}.1+cu126")
        assert limit not in list_limits(f"{major}.{minor}.0+cu126")


def test_minor_versions_are_numbers_and_not_text() -> None:
    assert not [limit for limit in list_limits("2.10.0") if limit.below <= (2, 9)]
