"""Fast tests first: whoever breaks something small hears of it at once."""

import signal

import hypothesis
import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
