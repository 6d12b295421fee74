"""Tests on the emulated accelerator. They run alone: with a device, all of torch behaves differently."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
PLUGIN = _HERE / "plugin"


def list_paths(config: pytest.Config) -> list[Path]:
    """List the paths of the command line."""
    return [Path(arg.split("::")[0]).resolve() for arg in config.args]


def is_alone(config: pytest.Config) -> bool:
    """Whether only tests of this folder are run."""
    return all(path.is_relative_to(_HERE) for path in list_paths(config))


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests out of runs of other tests: `python -m pytest tests/device` runs them."""
    return None if is_alone(config) else True


def pytest_configure(config: pytest.Config) -> None:
    if is_alone(config):
        load_device()
    elif any(path.is_relative_to(_HERE) for path in list_paths(config)):
        raise pytest.UsageError("tests/device run by themselves: with a device, all of torch behaves differently")


def load_device() -> None:
    """Register the device here, and have torch do so in every process that a test launches."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(PLUGIN)]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(PLUGIN), *others))
    sys.path.insert(0, str(PLUGIN))
    import torch  # noqa: F401  # loads the device, unless torch was imported before
    import emu_device  # isort: skip

    emu_device.load()
