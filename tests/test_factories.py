"""Tensors that TTrace makes name their device and, if they are floating point, their dtype.

A script may call `torch.set_default_device` and `torch.set_default_dtype`, and what TTrace computes must not change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
OF_INTEGERS = {"arange", "randint", "randperm"}
OF_ANYTHING = {
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "from_file",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
}
OF_ANYTHING |= {"randn", "scalar_tensor", "tensor", "zeros"}


def list_calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node.func.attr, node


def test_every_factory_call_names_device_and_dtype() -> None:
    wrong, num_calls = [], 0
    for path in sorted(SOURCES.rglob("*.py")):
        if path.parent.name == "scripts":
            continue  # as users write them
        for name, call in list_calls(path):
            needed = {"device"} if name in OF_INTEGERS else {"device", "dtype"} if name in OF_ANYTHING else set()
            num_calls += bool(needed)
            missing = needed - {keyword.arg for keyword in call.keywords}
            if missing:
                wrong.append(f"{path.relative_to(SOURCES)}:{call.lineno} torch.{name} without {', '.join(missing)}")
    assert not wrong
    assert num_calls > 30
