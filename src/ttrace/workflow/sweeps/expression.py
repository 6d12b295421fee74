"""Small expressions of a sweep: arithmetic, comparisons, and, or, not; nothing is called.

`tp * cp`, `tp * cp > 8`, `fp8 and not tp > 1`, `schedule in ("gpipe", "1f1b")`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
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
    """Evaluate an expression over these names."""
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
            found = (_evaluate_node(part, names) for part in parts)
            return all(found) if isinstance(op, ast.And) else any(found)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _evaluate_node(part, names)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -_check_number(_evaluate_node(part, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _NUMBERS:
            numbers = _check_number(_evaluate_node(left, names)), _check_number(_evaluate_node(right, names))
            return _check_number(_NUMBERS[type(op)](*numbers))
        case ast.Compare(left=first, ops=relations, comparators=rest):
            values = [_evaluate_node(part, names) for part in (first, *rest)]
            pairs = zip(values, relations, values[1:], strict=False)
            return all(_RELATIONS[type(relation)](a, b) for a, relation, b in pairs if _is_known(relation))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is neither a name, a number, a comparison nor arithmetic")


def _check_number(value: Any) -> int | float:
    """Refuse everything but numbers in arithmetic: a text times a large number would fill the memory."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
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
