"""Targets that fail on purpose: an error of another kind, too much time, too much memory, and a process that dies."""

from __future__ import annotations

import os
import time

from fuzz.target import Target

SIGN = b"!"
"""Inputs with this sign fail."""


def _raise(data: bytes) -> None:
    if SIGN in data:
        raise KeyError("planted")


def _waste_time(data: bytes) -> None:
    end = time.process_time() + 2.2
    while SIGN in data and time.process_time() < end:
        pass


def _waste_memory(data: bytes) -> None:
    if SIGN in data:
        (b"x" * (300 << 20)).count(b"y")


def _die(data: bytes) -> None:
    if SIGN in data:
        os.abort()


TARGETS = (
    Target("planted-error", _raise, make_seeds=lambda: (b"a", b"b!")),
    Target("planted-delay", _waste_time, make_seeds=lambda: (b"a", b"b!"), max_bytes=4),
    Target("planted-memory", _waste_memory, make_seeds=lambda: (b"a", b"b!"), max_bytes=4),
    Target("planted-death", _die, make_seeds=lambda: (b"a", b"b!")),
)
