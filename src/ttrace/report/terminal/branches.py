"""Tree of the modules with wrong tensors: open along the path to the first one, with only counts elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text
from rich.tree import Tree

from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import ROOT

_MOST_SIBLINGS = 3


@dataclass
class _Node:
    """A module that has wrong tensors, or contains a module that has."""

    children: dict[str, _Node] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    """The kinds of its own wrong tensors; those of parameters follow the parameter's name."""
    count: int = 0


def draw_branches(comparisons: Sequence[Comparison], first: Comparison) -> Tree | None:
    """Draw the tree; None where only one module is wrong, since the headline names it."""
    root = _Node()
    for comparison in comparisons:
        if comparison.verdict.is_wrong:
            _grow(root, comparison)
    module, _ = _locate(first)
    tree = Tree(Text(f"wrong: {root.count} tensors", "dim"), guide_style="dim")
    _add_children(tree, root, module.split("."))
    return tree if len(root.children) > 1 or any(node.children for node in root.children.values()) else None


def _locate(comparison: Comparison) -> tuple[str, str]:
    """Return a tensor's module, and what of the module is wrong."""
    name, kind = comparison.id.name, comparison.id.kind.value
    if comparison.id.kind.is_of_param:
        module, _, parameter = name.rpartition(".")
        return module or ROOT, f"{parameter}/{kind}"
    return name, kind


def _grow(root: _Node, comparison: Comparison) -> None:
    module, what = _locate(comparison)
    node = root
    node.count += 1
    for part in [] if module == ROOT else module.split("."):
        node = node.children.setdefault(part, _Node())
        node.count += 1
    node.kinds[what] = None


def _add_children(tree: Tree, node: _Node, path: list[str]) -> None:
    """Add the children of a node: the one on the path, opened, and the first of the others."""
    others = [name for name in node.children if name not in path[:1]]
    shown = [name for name in node.children if name in path[:1] or name in others[:_MOST_SIBLINGS]]
    for name in shown:
        child, label = node.children[name], name
        is_on_path = name in path[:1]
        rest = path[1:]
        while is_on_path and len(child.children) == 1 and not child.kinds:
            # A module with only one wrong child shares a line with it.
            (part, child) = next(iter(child.children.items()))
            label, is_on_path, rest = f"{label}.{part}", part in rest[:1], rest[1:]
        branch = tree.add(_make_label(label, child, is_first=is_on_path and not rest))
        if is_on_path and rest:
            _add_children(branch, child, rest)
    if len(others) > _MOST_SIBLINGS:
        hidden = others[_MOST_SIBLINGS:]
        tree.add(Text(f"... {len(hidden)} more: {sum(node.children[name].count for name in hidden)}", "dim"))


def _make_label(name: str, node: _Node, *, is_first: bool) -> Text:
    kinds = list(node.kinds)
    more = f" and {len(kinds) - 3} more" if len(kinds) > 3 else ""
    words = f": {', '.join(kinds[:3])}{more}" if kinds and not node.children else ""
    return Text.assemble((name, "bold red" if is_first else ""), (f"  {node.count}{words}", "dim"))
