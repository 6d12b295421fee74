"""Failure condition of a sweep: the simplest condition that holds for all failures and for no pass.

A condition is a disjunction of few terms, a term a conjunction of at most one predicate per axis: `tp > 1 and fp8`. Of
all conditions that separate failures from passes exactly, the one with the fewest terms and then the fewest predicates
is chosen. The first values of an axis are the simplest, as in a property tester.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ttrace.errors import TTraceError

Value = int | float | str | bool

_NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_RELATIONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def evaluate(text: str, names: Mapping[str, Value]) -> Any:
    """Evaluate an expression of a sweep over these names: arithmetic, comparisons, and, or, not, but no calls.

    `tp * cp`, `tp * cp > 8`, `fp8 and not tp > 1`, `schedule in ("gpipe", "1f1b")`.
    """
    try:
        return _evaluate_node(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise TTraceError(f"{text!r} cannot be computed: {error}.") from None


def _evaluate_node(node: ast.expr, names: Mapping[str, Value]) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return _check_number(value)
        case ast.Constant(value=float() | str() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"nothing is called {name!r}; there are {', '.join(names)}")
            return names[name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_evaluate_node(part, names) for part in parts)
        case ast.BoolOp(op=op, values=parts):
            values = (_evaluate_node(part, names) for part in parts)
            return all(values) if isinstance(op, ast.And) else any(values)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _evaluate_node(part, names)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -_check_number(_evaluate_node(part, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _NUMBERS:
            numbers = _check_number(_evaluate_node(left, names)), _check_number(_evaluate_node(right, names))
            return _check_number(_NUMBERS[type(op)](*numbers))
        case ast.Compare(left=first, ops=relations, comparators=rest):
            compared = [_evaluate_node(part, names) for part in (first, *rest)]
            pairs = zip(compared, relations, compared[1:], strict=False)
            return all(_RELATIONS[type(relation)](a, b) for a, relation, b in pairs if _is_known(relation))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is neither a name, a number, a comparison nor arithmetic")


def _check_number(value: Any) -> int | float:
    """Refuse everything but numbers in arithmetic: a text times a large number would fill the memory."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    if not is_short(value):
        raise ValueError("a number does not fit into 64 bits")
    return value


def is_short(value: Value) -> bool:
    """Whether a number fits into 64 bits, so that it can be computed with and written."""
    return not isinstance(value, int) or value.bit_length() < 64


def _is_known(relation: ast.cmpop) -> bool:
    if type(relation) not in _RELATIONS:
        raise ValueError("values are compared by ==, !=, <, <=, >, >=, in and not in")
    return True


Axes = Mapping[str, Sequence[Value]]
Cell = Mapping[str, Value]
MOST_TERMS, MOST_PREDICATES = 3, 4
"""A longer condition is not simple."""
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_MOST_CONSIDERED = 60
"""Terms of which combinations are tried, those that hold for most failures first."""


@dataclass(frozen=True)
class Predicate:
    """One statement on one axis."""

    text: str
    axis: str
    holds: Callable[[Value], bool] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Term:
    """Predicates that hold together; without any it always holds."""

    predicates: tuple[Predicate, ...]

    def holds(self, cell: Cell) -> bool:
        return all(predicate.holds(cell[predicate.axis]) for predicate in self.predicates)

    def __str__(self) -> str:
        return " and ".join(map(str, self.predicates)) or "always"


@dataclass(frozen=True)
class FailureCondition:
    """When it fails, and the smallest cell of each way to fail."""

    terms: tuple[Term, ...]
    """Empty if no simple condition separates failures from passes."""
    smallest: tuple[Cell, ...]

    def __str__(self) -> str:
        if not self.terms:
            return "no simple condition separates the failures from the passes"
        if self.terms == (Term(()),):
            return "fails always"
        if len(self.terms) == 1:
            return f"fails iff {self.terms[0]}"
        return f"fails iff {' or '.join(f'({term})' for term in self.terms)}"


def find_condition(axes: Axes, failures: Sequence[Cell], passes: Sequence[Cell]) -> FailureCondition:
    """Find the condition of these failures; there must be some."""
    assert failures
    terms = _choose_terms(_find_terms(axes, failures, passes), len(failures))
    if not terms:
        return FailureCondition((), (find_smallest(axes, failures),))
    ways = [[cell for cell in failures if term.holds(cell)] for term in terms]
    return FailureCondition(terms, tuple(find_smallest(axes, cells) for cells in ways))


def find_smallest(axes: Axes, cells: Iterable[Cell]) -> Cell:
    """Return the cell whose values come first in their axes, all together."""

    def size(cell: Cell) -> tuple[int, list[int]]:
        places = [list(values).index(cell[axis]) for axis, values in axes.items()]
        return sum(places), places

    return min(cells, key=size)


def list_predicates(axis: str, values: Sequence[Value]) -> list[Predicate]:
    """List all predicates of an axis, the most natural first; an axis with a single value has none."""
    if len(values) < 2:
        return []
    if all(isinstance(value, bool) for value in values):
        return [Predicate(axis, axis, bool), Predicate(f"not {axis}", axis, lambda value: not value)]
    predicates = []
    if all(isinstance(value, (int, float)) for value in values):
        numbers = sorted(values)
        predicates += [_make_predicate(axis, ">", value) for value in numbers[:-1]]
        predicates += [_make_predicate(axis, "==", value) for value in numbers[:-1]]
        predicates += [_make_predicate(axis, "<", value) for value in numbers[2:]]
        return predicates + [_make_predicate(axis, "!=", value) for value in numbers[1:-1]]
    predicates += [_make_predicate(axis, "==", value) for value in values]
    return predicates + [_make_predicate(axis, "!=", value) for value in values if len(values) > 2]


def _make_predicate(axis: str, sign: str, value: Value) -> Predicate:
    compare = _SIGNS[sign]
    return Predicate(f"{axis} {sign} {value!r}", axis, lambda held: compare(held, value))


def _find_terms(axes: Axes, failures: Sequence[Cell], passes: Sequence[Cell]) -> dict[Term, int]:
    """Find the terms that hold for no pass and need all their predicates, with the failures they hold for, as bits.

    Among terms that hold for the same failures only the first one, the simplest, is kept. The cells for
    which a predicate holds are the bits of a number, and a conjunction is the bitwise and of these numbers.
    """
    choices = {axis: list_predicates(axis, values) for axis, values in axes.items()}
    fails = {p: _pack_bits(p, failures) for predicates in choices.values() for p in predicates}
    passed = {p: _pack_bits(p, passes) for predicates in choices.values() for p in predicates}
    every, none = (1 << len(failures)) - 1, (1 << len(passes)) - 1
    terms: dict[Term, int] = {}
    for size in range(min(len(axes), MOST_PREDICATES) + 1):
        for chosen in itertools.combinations(choices.values(), size):
            for together in itertools.product(*chosen):
                held = reduce(lambda a, p: a & fails[p], together, every)
                is_clean = not reduce(lambda a, p: a & passed[p], together, none)
                # A larger term that holds for no more failures than a smaller one adds nothing.
                if held and is_clean and not any(held | other == other for other in terms.values()):
                    terms[Term(together)] = held
    return terms


def _pack_bits(predicate: Predicate, cells: Sequence[Cell]) -> int:
    return sum(1 << i for i, cell in enumerate(cells) if predicate.holds(cell[predicate.axis]))


def _choose_terms(terms: Mapping[Term, int], num_failures: int) -> tuple[Term, ...]:
    """Choose the fewest terms, and of those the shortest, that hold for all failures; none if many are needed."""
    every = (1 << num_failures) - 1
    most = sorted(terms, key=lambda term: -terms[term].bit_count())[:_MOST_CONSIDERED]
    for count in range(1, MOST_TERMS + 1):
        sufficient = [
            chosen
            for chosen in itertools.combinations(most, count)
            if reduce(lambda held, term: held | terms[term], chosen, 0) == every
        ]
        if sufficient:
            return min(sufficient, key=lambda chosen: sum(len(term.predicates) for term in chosen))
    return ()
