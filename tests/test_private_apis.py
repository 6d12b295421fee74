"""Private APIs of other packages stand in the compatibility files, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

SOURCE = Path(__file__).parent.parent / "src" / "ttrace"
ALONE = {"compat/distributed.py", "compat/torch.py", "adapters/deepspeed/compat.py"}
"""Files that hold nothing else."""
COMPAT = {
    *ALONE,
    "adapters/wrappers.py",
    "adapters/megatron/schedule.py",
    "adapters/torchtitan/compat.py",
    "adapters/transformers/adapter.py",
}
EXEMPT = {"_pytree", "_parameters", "_modules", "_replace", "_fields"}
"""Documented as public: the last two are of named tuples, whose own names begin so that fields can have any others."""
THEIRS = {name for owner in (nn.Module(), torch.Tensor) for name in dir(owner)}
"""Attributes of torch that a file of ours may also use for its own objects."""


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).as_posix() not in COMPAT]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {*EXEMPT, "_"}


def own_names(tree: ast.AST) -> set[str]:
    """The names that a file itself defines: variables, functions, classes, and attributes of `self` and `cls`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
    return found


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names of other packages that a file imports, touches, or writes as text for getattr."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ttrace"):
            names = [part for alias in node.names for part in (*(node.module or "").split("."), alias.name)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_self and (node.attr not in own or node.attr in THEIRS):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if name.isidentifier() and is_private(name) and name not in own and not name.lower().startswith("_ttrace"):
                yield node.lineno, name


def _uses_of(part: ast.AST, tree: ast.Module) -> list[str]:
    """Return the private names that a part of a file uses and that the file itself does not define."""
    return [name for _, name in uses(part) if name not in own_names(tree) or name in THEIRS]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_only_compatibility_files_touch_what_is_private(path: Path) -> None:
    assert list(uses(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("name", sorted(COMPAT))
def test_every_entry_says_which_versions_have_it_and_what_happens_without_it(name: str) -> None:
    tree = ast.parse((SOURCE / name).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = [function for function in functions if name in ALONE or any(_uses_of(function, tree))]
    assert functions
    for function in functions:
        words = ast.get_docstring(function) or ""
        is_told = "ithout" in words and (
            "since 2." in words or "in 5." in words or "in all versions" in words or "in 0." in words
        )
        assert is_told or "see `" in words.lower(), function.name
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.Assign) and (name in ALONE or any(_uses_of(node, tree))):
            assert isinstance(after, ast.Expr)
            assert "ithout" in ast.unparse(after) or "since" in ast.unparse(after), ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "torch._C.x",
        "module._buffers",
        "class A:\n  def f(self, module):\n    self._buffers = module._buffers",
        "getattr(x, '_orig_mod')",
    ],
)
def test_a_private_use_is_seen(code: str) -> None:
    assert list(uses(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils import _pytree",
        "module._parameters",
        "class A:\n  def f(self, other):\n    return self._x == other._x",
        "T = TypeVar('T')",
        "x.__dict__",
    ],
)
def test_our_own_are_not(code: str) -> None:
    assert not list(uses(ast.parse(code)))
