"""File of a sweep: axes, values derived from them, cells to leave out, and the commands of each cell.

reference = "python train.py {fp8}"
candidate = "torchrun --standalone --nproc-per-node {ranks} train.py --tp {tp} --cp {cp} {fp8}"
exclude = ["tp * cp > 8"]

[axes]
tp = [1, 2, 4]
cp = [1, 2]
fp8 = "--fp8"  # a text: without it and with it

[derived]
ranks = "tp * cp"
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from ttrace.errors import TTraceError
from ttrace.untrusted import load_settings
from ttrace.workflow.launch import split_command
from ttrace.workflow.sweeps.failure_condition import Axes, Value, evaluate, is_short

RANKS = "ranks"
"""The derived value that is the number of ranks of a cell."""
MAX_CELLS = 4096
"""Each cell is a run of its own. More of them, before any is left out, are a mistake."""
_Listed = StrictBool | StrictInt | StrictFloat | StrictStr


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reference: str
    candidate: str
    axes: dict[str, StrictStr | list[_Listed]] = Field(min_length=1)
    derived: dict[str, str] = {}
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Configuration:
    """One cell: its values, how many ranks it takes, and its commands."""

    values: dict[str, Value]
    num_ranks: int | None
    """None if the sweep does not state it."""
    reference: tuple[str, ...]
    candidate: tuple[str, ...]

    @property
    def name(self) -> str:
        return spell_values(self.values)

    @property
    def folder(self) -> str:
        """A name that no other cell of the sweep has, also where values differ only in what no folder may be called."""
        text = "-".join(_spell_value(axis, value) for axis, value in self.values.items())
        plain = re.sub(r"[^\w.=-]+", "_", text)
        if plain == text and not any("=" in str(value) for value in self.values.values()):
            return plain
        return f"{plain}-{hashlib.sha256(repr(self.values).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Matrix:
    """All cells of a sweep, in the order of their axes."""

    axes: Axes
    cells: tuple[Configuration, ...]

    @classmethod
    def load(cls, path: Path) -> Matrix:
        """Load a file of a sweep, and list its cells."""
        advice = "It needs reference = and candidate = commands and a table [axes], for instance tp = [1, 2]."
        return _make_matrix(load_settings("sweep", path, _File.model_validate, advice=advice))


def spell_values(values: dict[str, Value]) -> str:
    """Spell the values of a cell: `tp=2 cp=1 fp8`; a flag that is off is left out."""
    return (
        " ".join(_spell_value(axis, value) for axis, value in values.items() if value is not False)
        or "without any flag"
    )


def _spell_value(axis: str, value: Value) -> str:
    if isinstance(value, bool):
        return axis if value else f"no_{axis}"
    return f"{axis}={value}"


def _make_matrix(file: _File) -> Matrix:
    axes: dict[str, list[Value]] = {
        axis: [False, True] if isinstance(values, str) else list(values) for axis, values in file.axes.items()
    }
    for axis, values in axes.items():
        if not all(map(is_short, values)):
            raise TTraceError(f"axis {axis!r} has a number that does not fit into 64 bits.")
        if not axis.isidentifier() or not values or len({_spell_value(axis, value) for value in values}) < len(values):
            raise TTraceError(f"axis {axis!r} has values {values}. It needs a plain name, and each value once.")
    num_cells = math.prod(map(len, axes.values()))
    if num_cells > MAX_CELLS:
        raise TTraceError(
            f"the sweep has {num_cells} cells, but at most {MAX_CELLS} are run. Give its axes fewer values."
        )
    both = set(axes) & set(file.derived)
    if both:
        raise TTraceError(f"{sorted(both)[0]!r} is an axis and derived. Rename one of them.")
    cells = [_make_cell(file, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    remaining = tuple(cell for cell in cells if cell is not None)
    if not remaining:
        raise TTraceError("the sweep excludes every cell.")
    return Matrix(axes, remaining)


def _make_cell(file: _File, values: dict[str, Value]) -> Configuration | None:
    names = dict(values)
    for name, text in file.derived.items():
        names[name] = evaluate(text, names)
    if any(evaluate(text, names) for text in file.exclude):
        return None
    flags = {axis: text for axis, text in file.axes.items() if isinstance(text, str)}
    texts = {name: _fill_in(value, flags.get(name)) for name, value in names.items()}
    reference, candidate = (
        split_command(_fill_template(command, texts)) for command in (file.reference, file.candidate)
    )
    ranks = names.get(RANKS)
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise TTraceError(f"{spell_values(values)} takes {ranks!r} ranks. `ranks` must be a number above zero.")
    return Configuration(values, ranks, reference, candidate)


def _fill_in(value: Value, flag: str | None) -> str:
    if flag is not None:
        return flag if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fill_template(template: str, texts: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1] not in texts:
            raise TTraceError(f"{template!r} names {match[0]}, but there are only {', '.join(texts)}.")
        return texts[match[1]]

    return re.sub(r"\{([A-Za-z_]\w*)\}", replace, template)
