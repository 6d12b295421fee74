"""Ranks on which `import megatron.core` gives an unmodified wheel, on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.harness.limits import HANG
from zoo.harness.megatron.install import install
from zoo.harness.megatron.wheels import NEWEST, wheel
from zoo.harness.ranks import on_ranks


def on_megatron(
    num_ranks: int, function: Callable[..., Any], *args: Any, version: str = NEWEST, timeout: float = HANG
) -> list[Any]:
    """What a module-level function returned on each rank; nothing of Megatron comes into the calling process."""
    wheel(version)  # once, rather than on all ranks together
    return on_ranks(num_ranks, _installed, version, function, args, timeout=timeout)


def _installed(version: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    install(version)
    return function(*args)
