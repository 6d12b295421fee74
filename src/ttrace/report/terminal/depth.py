"""Depth of a model in the terminal: a strip of its layers, a tree of its wrong modules, and the place of each tensor.

The strip has one character for each layer: whether it is wrong, or how close it is to its tolerance. The tree is open
along the path to the first wrong module, with only counts elsewhere. Forward, backward and updates share one axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text
from rich.tree import Tree

from ttrace.judge.depth import layer_of
from ttrace.judge.verdict import Comparison
from ttrace.layouts.ids import ROOT, Kind, TensorId

WRONG, OPEN, NOTHING = "✗", "?", "·"
_LEVELS = "▁▂▃▄▅▆▇"
_MEANINGS = {WRONG: "✗ wrong", OPEN: "? not judged", NOTHING: "· nothing to judge"}
_WITHIN = "▁ to ▇ error within the tolerance"
_ROWS: Mapping[str, frozenset[Kind]] = {
    "forward": frozenset({Kind.INPUT, Kind.OUTPUT, Kind.DECISION, Kind.BUFFER}),
    "backward": frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.RECOMPUTE_INPUT, Kind.RECOMPUTE_OUTPUT}),
    "param_grad": frozenset({Kind.PARAM_GRAD, Kind.MAIN_GRAD}),
    "updates": frozenset({Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.BUFFER_AFTER}),
}


def draw_strip(comparisons: Sequence[Comparison], width: int) -> list[tuple[str, str]]:
    """Draw labelled lines: one that explains the strip, then one for each part of a step.

    A model without layers has none. Where there are more layers than `width`, several share a character.
    """
    layered = [(place, c) for c in comparisons if (place := layer_of(c.id.name)) is not None]
    stacks = Counter(stack for (stack, _), _ in layered)
    if not stacks:
        return []
    stack = stacks.most_common(1)[0][0]
    mine = [(layer, comparison) for (name, layer), comparison in layered if name == stack]
    last = max(layer for layer, _ in mine)
    if last == 0:
        return []
    per_mark = -(-(last + 1) // width)
    name = f"{stack}." if stack else ""
    shared = f", {per_mark} layers per mark" if per_mark > 1 else ""
    rows = list(_draw_rows(mine, last // per_mark + 1, per_mark))
    return [("depth", f"{name}0 to {last}{shared}: {_explain_marks(''.join(marks for _, marks in rows))}"), *rows]


def _explain_marks(drawn: str) -> str:
    """Explain the marks that occur: in a clean run nothing is called wrong."""
    words = [text for mark, text in _MEANINGS.items() if mark in drawn]
    return ", ".join([*words, *([_WITHIN] if set(_LEVELS) & set(drawn) else [])])


def _draw_rows(mine: Sequence[tuple[int, Comparison]], num_marks: int, per_mark: int) -> Iterator[tuple[str, str]]:
    for label, kinds in _ROWS.items():
        cells: list[list[Comparison]] = [[] for _ in range(num_marks)]
        for layer, comparison in mine:
            if comparison.id.kind in kinds:
                cells[layer // per_mark].append(comparison)
        if any(cells):
            yield label, "".join(map(_choose_mark, cells))


def _choose_mark(cell: Sequence[Comparison]) -> str:
    if any(comparison.verdict.is_wrong for comparison in cell):
        return WRONG
    if any(comparison.spoils for comparison in cell):
        return OPEN
    excesses = [comparison.excess for comparison in cell if comparison.tolerance is not None]
    if not excesses:
        return NOTHING
    return _LEVELS[int(min(max(excesses) * len(_LEVELS), len(_LEVELS) - 1))]


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


_ENDS = (Kind.OUTPUT, Kind.INPUT)


@dataclass(frozen=True)
class Depth:
    """The place of each tensor: at its module's input or output, in the order of the reference's forward pass."""

    places: tuple[int, ...]
    """One for each comparison."""
    names: tuple[str, ...]
    """The module or parameter at each place."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Depth:
        known: dict[tuple[str, Kind], int] = {}
        for comparison in comparisons:
            if comparison.id.kind in _ENDS:
                known.setdefault((comparison.id.name, comparison.id.kind), len(known))
        names = tuple(name for name, _ in known) or ("",)
        places, last = [], 0
        for comparison in comparisons:
            # A tensor that belongs to no module, such as a loss, gets the place of the tensor before it.
            last = _find_place(comparison.id, known, last)
            places.append(last)
        return cls(tuple(places), names)


def _find_place(tensor_id: TensorId, known: dict[tuple[str, Kind], int], last: int) -> int:
    name, kind = tensor_id.name, tensor_id.kind.primal
    if tensor_id.kind.is_of_param:
        name = name.rpartition(".")[0]
    for end in (kind, *_ENDS):
        if (name, end) in known:
            return known[name, end]
    return last
