"""Changes of texts and of JSON that keep most of their form: values that parsers do not expect, in places they do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS: tuple[float, ...] = (
    *(0, 1, -1, 2, 3, 7, 8, 255, 4096, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, 10**30),
    *(0.5, -0.0, 1e-310, 1e308, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *(
        "",
        ".",
        "..",
        "/",
        "-",
        "reference",
        "candidate",
        "0/0/x/output",
        "0/-/x/param",
        "tp=2",
        "tp=2 | ep=2",
        "zigzag",
    ),
    *(
        "fused(2)",
        "nan",
        "\u00b2",
        "\u0663",
        "\u202e",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "<script>",
        "a" * 300,
        "[z-a]",
        "F32",
    ),
    *("Normal", "Permutation", "BF16", "I64", "../reference", "s3://x/y", "x" * 5000),
)
SHAPES: tuple[Any, ...] = ([], {}, [[]], [{}], None, True, False, [0, 0], [[0, 1]], [1] * 70, {"a": {}})
DIGITS = ("9" * 25, "9" * 400, "9" * 5000, "0" * 50, "1e999", "-0", "1_0", "0x" + "f" * 6000)
DEEP = ("[" * 3000, "(" * 300, '{"a":' * 1500, "-" * 3000, "not " * 500)
_NUMBER = re.compile(r"[0-9]+")


def mutate_text(text: str, words: Sequence[str], random: Random) -> str:
    """Change one place of a text: another word, a number that is too long, nesting that is too deep, a part twice."""
    at, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    what = random.randrange(12)
    if what < 4 and words:
        return text[:at] + random.choice(words) + text[at if random.random() < 0.5 else min(end, at + 8) :]
    if what < 6:
        return text[:at] + text[min(end, at + random.choice((1, 3, 20))) :]
    if what < 8:
        return text[:end] + text[at:end] * random.choice((1, 1, 2, 30)) + text[end:]
    if what < 10 and (numbers := list(_NUMBER.finditer(text))):
        number = random.choice(numbers)
        other = random.choice(DIGITS) if random.random() < 0.3 else str(random.choice(NUMBERS))
        return text[: number.start()] + other + text[number.end() :]
    return text[:at] + random.choice((*DIGITS, *DEEP, *TEXTS)) + text[at:]


def mutate_json(value: Any, random: Random) -> Any:
    """Return JSON in which one value is another, is missing, or is there twice."""
    places = _list_places(value)
    if not places:
        return _draw_value(value, random)
    holder, key = random.choice(places)
    what = random.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, list):
        holder.insert(key, holder[random.randrange(len(holder))])
    elif what == 1:
        holder[random.choice(TEXTS)] = holder[key]
    elif what == 2:
        other, name = random.choice(places)
        if name in other if isinstance(other, dict) else name < len(other):
            holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = _draw_value(holder[key], random)
    return value


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """List every place in a JSON value, as a container and a key."""
    places, rest = [], [value]
    while rest:
        holder = rest.pop()
        for key, inner in holder.items() if isinstance(holder, dict) else enumerate(holder):
            places.append((holder, key))
            if isinstance(inner, (dict, list)):
                rest.append(inner)
    return places


def _draw_value(old: Any, random: Random) -> Any:
    """Draw a value in place of another: mostly of its type, and near it."""
    if random.random() < 0.15:
        return _copy(random.choice(random.choice((NUMBERS, TEXTS, SHAPES))))
    if isinstance(old, bool) or old is None:
        return _copy(random.choice(SHAPES))
    if isinstance(old, int):
        near = (old + 1, old - 1, old * 2, old // 2, old + 8, old - 8, -old, old + 4)
        return random.choice(near) if random.random() < 0.6 else random.choice(NUMBERS)
    if isinstance(old, float):
        return random.choice(NUMBERS)
    if isinstance(old, str):
        return random.choice(TEXTS) if random.random() < 0.5 else mutate_text(old, TEXTS, random)
    return _copy(random.choice(SHAPES))


def _copy(value: Any) -> Any:
    """Copy a value that is put into others: one that is put into itself would never end."""
    return deepcopy(value)


def mutate_json_text(data: bytes, random: Random) -> bytes:
    """Change a JSON text: a value of it, or what is no JSON any more."""
    text = data.decode("utf-8", "surrogateescape")
    if random.random() < 0.75:
        try:
            value = json.loads(text)
            if isinstance(value, (dict, list)):
                for _ in range(random.choice((1, 1, 2, 4))):
                    value = mutate_json(value, random)
                return json.dumps(value, separators=random.choice(((",", ":"), (", ", ": ")))).encode()
        except (ValueError, RecursionError, TypeError):
            pass
    return mutate_text(text, TEXTS, random).encode("utf-8", "surrogatepass")
