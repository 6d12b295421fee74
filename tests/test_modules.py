"""Every module of the package can be imported, whatever is installed."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import pytest_ttrace
import ttrace

NAMES = [
    module.name
    for package in (ttrace, pytest_ttrace)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    # A library for ctypes; and kernels that need Triton, which are imported if it is there.
    if not module.name.endswith(("__main__", ".kernels.kernels", ".triton_kernels"))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)
