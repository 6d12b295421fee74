"""Fast tests first: whoever breaks something small hears of it at once."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.support.torch_defaults import use_defaults
from ttrace.values.kernels.library import read_environment

# A shell that runs the tests in the background has them ignore SIGINT, and with them every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

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
    read_environment.cache_clear()
    yield
    read_environment.cache_clear()


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
