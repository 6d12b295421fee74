"""Maps between two implementations of a model: which names correspond, and how tensors are joined, ordered and padded.

[names]                                     # the reference's modules and parameters = the candidate's; * is one word
"model.layers.*.mlp.down_proj" = "decoder.layers.*.mlp.linear_fc2"

[slots]                                     # inputs and outputs of a module, by the candidate's name = the slot there
"decoder.layers.*/output" = "0"

[dims]                                      # the order of dims in a module and all inside it
"decoder" = "batch seq ... -> seq batch ..."

[[join]]                                    # modules or parameters that are one on the other side
parts = ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"]
whole = "decoder.layers.*.mlp.linear_fc1"

[ignore]                                    # sites that only one side has; ** is any number of words
reference = ["**.act_fn"]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ttrace.layouts.ids import ROOT, Site
from ttrace.ports.dim_order import DimOrder
from ttrace.untrusted import load_settings, parse_toml

ANY, NUMBER, MANY = "*", "#", "**"
"""In names, `*` stands for one component and `#` for the number of a part: `layers.*.mlp`. In sites, `**` is any
number of components, and `*` also for any characters within one: `**.act_fn/output`."""
_SHIPPED = resources.files("ttrace.ports") / "maps"


class Join(BaseModel):
    """Modules or parameters of one side that are, in this order, the parts of one tensor of the other side.

    A `#` in the name of a part is its number in the whole, which then has an additional dim.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: tuple[str, ...] = Field(min_length=1)
    whole: str
    """The name of the whole, in the candidate's names."""
    side: Literal["reference", "candidate"] = "reference"
    """The side that has the parts."""
    groups: int | str = 1
    """The number of groups in the whole, each with an equal share of every part. A text is the name of a number in the
    model's config, or a quotient of two."""
    rotary: tuple[int | str, ...] = ()
    """For each part, the size of its heads if the elements of their halves are interleaved in the whole, or 0. Empty
    if no part is interleaved."""

    @model_validator(mode="after")
    def _check_rotary(self) -> Join:
        if self.rotary and len(self.rotary) != len(self.parts):
            raise ValueError(f"rotary of {self.whole} needs a size for each of its {len(self.parts)} parts")
        return self


class IgnoredSites(BaseModel):
    """Sites that only one side has, or that have a different meaning on the other side."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()


class PortMap(BaseModel):
    """The correspondence of two implementations of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: dict[str, str] = {}
    slots: dict[str, str] = {}
    dims: dict[str, str] = {}
    join: tuple[Join, ...] = ()
    padded: tuple[str, ...] = ()
    """The candidate's modules and parameters whose rows are padded, such as those of a vocabulary."""
    ignore: IgnoredSites = IgnoredSites()

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: dict[str, str]) -> dict[str, str]:
        for order in dims.values():
            DimOrder.parse(order)
        return dims

    @classmethod
    def load(cls, given: str) -> PortMap:
        """Load a map from a file, or one of the maps that TTrace ships with, by its name."""
        if given in list_shipped():
            return cls.model_validate(parse_toml((_SHIPPED / f"{given}.toml").read_text(encoding="utf-8"), given))
        advice = (
            f"Give the path of a TOML file with a table [names] or [[join]], or one of {', '.join(list_shipped())}."
        )
        return load_settings("map", Path(given), cls._validate_file, advice=advice)

    @classmethod
    def _validate_file(cls, content: Mapping[str, Any]) -> PortMap:
        port_map = cls.model_validate(content)
        if not port_map.names and not port_map.join:
            raise ValueError("it maps nothing")
        return port_map


@cache
def list_shipped() -> tuple[str, ...]:
    """List the names of the maps that TTrace ships with."""
    names = (each.name for each in _SHIPPED.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@dataclass(frozen=True)
class NameMatch:
    """The components that a pattern's stars matched, the number, and the rest of the name."""

    stars: tuple[str, ...]
    number: int | None
    rest: str

    def fill(self, pattern: str) -> str:
        """Fill the stars of another pattern, and append the rest."""
        stars = iter(self.stars)
        return ".".join(next(stars, ANY) if word == ANY else word for word in pattern.split(".")) + self.rest


def match_name(pattern: str, name: str) -> NameMatch | None:
    """Match a pattern against the first components of a name."""
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
    """Rename with the longest pattern that matches; None if there is none."""
    candidates = ((len(pattern.split(".")), match, names[pattern]) for pattern, match in _match_all(names, name))
    best = max(candidates, key=lambda each: each[0], default=None)
    return None if best is None else best[1].fill(best[2])


def matches_site(pattern: str, site: Site) -> bool:
    """Return whether a site matches `name[/kind[.slot]]`; omitted parts match anything, an empty slot only itself."""
    name, kind, slot = _compile(pattern)
    return bool(kind.fullmatch(site.kind) and name.fullmatch(f"{site.name}.") and slot.fullmatch(site.slot))


def format_map(port_map: PortMap) -> str:
    """Format a map as a TOML file, as `ttrace map` prints it."""
    return "\n".join(_list_lines(port_map)).strip() + "\n"


def _match_all(patterns: Iterable[str], name: str) -> Sequence[tuple[str, NameMatch]]:
    return [(pattern, match) for pattern in patterns if (match := match_name(pattern, name)) is not None]


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


def _list_lines(port_map: PortMap) -> Iterator[str]:
    if port_map.padded:
        yield f"padded = {_format_list(port_map.padded)}"
    for title, table in (("names", port_map.names), ("slots", port_map.slots), ("dims", port_map.dims)):
        yield from _list_table(title, table)
    for join in port_map.join:
        yield from _list_join(join)
    ignored = {"reference": port_map.ignore.reference, "candidate": port_map.ignore.candidate}
    if any(ignored.values()):
        yield from ("", "[ignore]")
        for side, sites in ignored.items():
            yield from (f"{side} = [", *(f"    {json.dumps(site)}," for site in sites), "]")


def _list_table(title: str, table: Mapping[str, str]) -> Iterator[str]:
    if table:
        yield from ("", f"[{title}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()))


def _list_join(join: Join) -> Iterator[str]:
    yield from ("", "[[join]]")
    if join.side != "reference":
        yield f"side = {json.dumps(join.side)}"
    yield f"parts = {_format_list(join.parts)}"
    yield f"whole = {json.dumps(join.whole)}"
    if join.groups != 1:
        yield f"groups = {json.dumps(join.groups)}"
    if join.rotary:
        yield f"rotary = {_format_list(join.rotary)}"


def _format_list(values: Iterable[str | int]) -> str:
    return "[" + ", ".join(map(json.dumps, values)) + "]"
