"""The machine with faults, one for each test process."""

from collections.abc import Iterator

import pytest

from tests.support.faulty_machine.machine import Trials, open_machine


@pytest.fixture(scope="session")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("machine")
    with open_machine(folder) as machine:
        yield Trials(machine, folder)
