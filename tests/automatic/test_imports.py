"""A function waits for the import of a module, whoever looks for the module before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ttrace.automatic.imports import watch_imports
from ttrace.patches import Patches


@pytest.mark.parametrize("is_sought", [False, True])
def test_a_function_is_called_when_its_module_is_imported(
    is_sought: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_package").mkdir()
    (tmp_path / "awaited_package" / "__init__.py").touch()
    (tmp_path / "awaited_package" / "awaited.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    patches, values = Patches(), []

    def on_import(module: ModuleType) -> None:
        values.append(module.VALUE)

    before = list(sys.meta_path)
    watch_imports({"awaited_package.awaited": on_import}, patches)
    try:
        if is_sought:
            assert importlib.util.find_spec("awaited_package.awaited") is not None
        assert values == []
        importlib.import_module("awaited_package.awaited")
        assert values == [7]
    finally:
        patches.remove()
        for name in [name for name in sys.modules if name.startswith("awaited_package")]:
            del sys.modules[name]
    assert sys.meta_path == before
