"""Patterns over names of modules and parameters: `layers.*.mlp`, where `*` stands for one word.

In patterns over sites, `**` stands for any number of words, and a `*` in a word for any letters: `**.act_fn/output`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ttrace.layouts.ids import ROOT, Site

ANY, NUMBER, MANY = "*", "#", "**"


@dataclass(frozen=True)
class NameMatch:
    """The words that a pattern's stars stand for, its number, and what follows the pattern in the name."""

    stars: tuple[str, ...]
    number: int | None
    rest: str

    def fill(self, pattern: str) -> str:
        """Put the words into another pattern, with what follows."""
        stars = iter(self.stars)
        return ".".join(next(stars, ANY) if word == ANY else word for word in pattern.split(".")) + self.rest


def match_name(pattern: str, name: str) -> NameMatch | None:
    """Match a pattern against the first words of a name."""
    wanted, words = pattern.split("."), name.split(".")
    if len(words) < len(wanted):
        return None
    stars: list[str] = []
    number = None
    for want, word in zip(wanted, words, strict=False):
        if want == ANY:
            stars.append(word)
        elif want == NUMBER and word.isdecimal():
            number = int(word)
        elif want != word:
            return None
    rest = words[len(wanted) :]
    return NameMatch(tuple(stars), number, "".join(f".{word}" for word in rest))


def rename(names: Mapping[str, str], name: str) -> str | None:
    """Rename by the longest pattern that matches; None if there is none."""
    found = ((len(pattern.split(".")), match, names[pattern]) for pattern, match in _match_all(names, name))
    best = max(found, key=lambda each: each[0], default=None)
    return None if best is None else best[1].fill(best[2])


def _match_all(patterns: Iterable[str], name: str) -> Sequence[tuple[str, NameMatch]]:
    return [(pattern, match) for pattern in patterns if (match := match_name(pattern, name)) is not None]


def matches_site(pattern: str, site: Site) -> bool:
    """Whether a site matches `name[/kind[.slot]]`; what is omitted matches anything, an empty slot only itself."""
    name, kind, slot = _compile(pattern)
    return bool(kind.fullmatch(site.kind) and name.fullmatch(f"{site.name}.") and slot.fullmatch(site.slot))


@cache
def _compile(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    name, _, rest = pattern.partition("/")
    kind, dot, slot = rest.partition(".")
    words = [name] if name == ROOT else name.split(".")
    names = "".join("(?:[^.]+[.])*" if word == MANY else f"{_translate(word)}[.]" for word in words)
    slots = _translate(slot, among=".") if dot else ".*"
    return re.compile(names), re.compile(_translate(kind or ANY)), re.compile(slots)


def _translate(word: str, among: str = "[^.]") -> str:
    escaped = re.escape(word).replace(r"\*", f"{among}*").replace(r"\?", among)
    return re.sub(r"\\\[(.*?)\\\]", r"[\1]", escaped)
