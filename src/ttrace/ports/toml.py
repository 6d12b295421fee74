"""Maps as TOML, as `ttrace map` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from ttrace.ports.port_map import Join, PortMap


def format_map(port_map: PortMap) -> str:
    """Format a map as a file that can be read again."""
    return "\n".join(_list_lines(port_map)).strip() + "\n"


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
