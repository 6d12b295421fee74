"""Fast tests first: whoever breaks something small hears of it at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.support.torch_defaults import use_defaults
from ttrace.values.kernels.choice import read_requested_variant
from zoo.harness.warm import warm

# A shell that runs the tests in the background has them ignore SIGINT, and with them every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `ttrace`, `python` and `torchrun` are those of this environment, whatever the shell finds.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# An example that takes long on a loaded machine is not wrong.
hypothesis.settings.register_profile("ttrace", deadline=None)
hypothesis.settings.load_profile("ttrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run every cell of the matrix, and write docs/reference/matrix.md; all of the zoo",
    )
    parser.addoption("--default-dtype", help="run each test under torch.set_default_dtype, of bfloat16 for instance")
    parser.addoption("--default-device", help="run each test under torch.set_default_device; tests/device have one")


@pytest.fixture(autouse=True)
def torch_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set what a script may set: nothing that TTrace computes may depend on it."""
    dtype, device = (request.config.getoption(name) for name in ("--default-dtype", "--default-device"))
    if not dtype and not device:
        yield
        return
    if request.node.get_closest_marker("own_defaults"):
        pytest.skip("what the test itself computes needs torch's own defaults")
    with use_defaults(getattr(torch, dtype) if dtype else None, device):
        yield


@pytest.fixture
def new_environment() -> Iterator[None]:
    """Have the environment asked again which kernels to use, in this test and after it."""
    read_requested_variant.cache_clear()
    yield
    read_requested_variant.cache_clear()


@pytest.fixture(scope="session")
def warm_variables() -> Iterator[Mapping[str, str]]:
    """Start one server for all tests of this process."""
    with warm() as variables:
        yield variables


@pytest.fixture
def warm_commands(warm_variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `ttrace`, `python` and `torchrun` forked from a process that has imported torch: seconds less for each."""
    for name, value in warm_variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Return the values that a parameter has in the selected tests of a module: a shared launch runs no others."""

    def values(parameter: str) -> list[Any]:
        calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
        return [call.params[parameter] for call in calls if call is not None and parameter in call.params]

    return values


LONGEST = (
    "test_pages",
    "zoo/test_frameworks",
    "matrix/test_cells",
    "zoo/test_score",
    "transformers/test_layouts",
    "megatron/test_sweep",
    "workflow/test_run",
)
"""The modules that take minutes; they begin first, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, and of the slow ones the longest first."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.with_suffix("").as_posix()
        longest = (place for place, name in enumerate(LONGEST) if path.endswith(name))
        return item.get_closest_marker("slow") is not None, next(longest, len(LONGEST))

    items.sort(key=place)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what failed at once, with its last lines: a run that is cut off prints no summary."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\nFAILED {report.nodeid} ({report.when})", *report.longreprtext.splitlines()[-30:], sep="\n")
