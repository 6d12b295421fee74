"""Listing of a trace: a line for every id, or for every shard of one id."""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttrace.errors import TTraceError
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.layouts.ids import TensorId
from ttrace.report.facts import describe_provenance
from ttrace.trace.format import DTYPE_NAMES
from ttrace.trace.reader import Shard, Trace
from ttrace.trace.store import Place

Row = dict[str, Any]
_MOST_PROBLEMS = 5


def summarize(folder: Place) -> Row:
    """Summarize a trace in numbers."""
    trace = Trace(folder)
    return {
        "folder": str(folder),
        "role": trace.manifest.role,
        "mesh": trace.manifest.mesh,
        "ranks": len(trace.ranks),
        "tensors": len(trace.shards),
        "problems": list(trace.problems()),
    }


def show_problems(console: Console, problems: Sequence[str]) -> None:
    """Show what makes a trace less than a complete one."""
    for problem in problems[:_MOST_PROBLEMS]:
        console.print(Text(f"? {problem}", "yellow"), soft_wrap=True)
    if len(problems) > _MOST_PROBLEMS:
        console.print(f"... and {len(problems) - _MOST_PROBLEMS} further problems", highlight=False)


def list_rows(folder: Path, pattern: str, verdicts: Mapping[str, str] | None = None) -> list[Row]:
    """List a row for each id that matches, or for each shard if only one id does. A run lists both of its sides.

    In a run, a layout that is not stated is inferred as in a check: from the shapes of the reference. With `verdicts`,
    by id, each row has the verdict of its tensor.
    """
    found: list[tuple[str, list[Shard]]] = []
    sides = _open_sides(folder)
    matches = _choose_matching([str(key) for _, trace in sides for key in trace.shards], pattern)
    for side, trace in sides:
        chosen = [key for key in trace.shards if str(key) in matches]
        found += [(side, _infer_layout(trace, key, sides[0][1])) for key in chosen]
    if not found:
        raise TTraceError(f"{folder} has no tensor {pattern!r}. `ttrace show {folder}` lists all.")
    if len({shards[0].id for _, shards in found}) == 1:
        rows = [_make_shard_row(side, shard) for side, shards in found for shard in shards]
    else:
        rows = [_make_id_row(side, shards) for side, shards in found]
    return [{**row, "verdict": verdicts.get(row["id"], "")} for row in rows] if verdicts else rows


def show(console: Console, folder: Path, found: list[Row]) -> None:
    """Print rows as a table, and the next command."""
    one = len({row["id"] for row in found}) == 1
    columns = [name for name in found[0] if name not in ("id", "verdict")] if one else list(found[0])
    if one:
        verdict = found[0].get("verdict")
        console.print(Text.assemble((found[0]["id"], "bold"), f" is {verdict}" if verdict else ""), soft_wrap=True)
    print_table(console, columns, found)
    console.print(Text(f"next: {_make_next_command(folder, found, one=one)}"), soft_wrap=True)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Row], *, folds: bool = True) -> None:
    """Print these columns of rows; in a narrow terminal cells are folded, or else the lines are as long as they are."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        # Text, because a name or a rule may look like markup.
        table.add_row(*(Text(_format_cell(row[name])) for name in columns))
    if not folds:
        widths = [max(len(name), *(len(_format_cell(row[name])) for row in rows)) for name in columns]
        console.width = max(console.width, sum(widths) + 2 * len(widths))
    console.print(table, crop=False)


def _make_next_command(folder: Path, found: list[Row], *, one: bool) -> str:
    where, first = shlex.quote(str(folder)), shlex.quote(found[0]["id"])
    if not one:
        return f"ttrace show {where} {first}"
    is_run = len({row["side"] for row in found}) > 1
    return f"ttrace diff {where} {first}" if is_run else f"ttrace show {where}"


def _choose_matching(ids: Sequence[str], pattern: str) -> set[str]:
    """Choose the id that equals the pattern, else the ids that match it as a glob, else those that contain it."""
    if pattern in ids:
        return {pattern}
    matching = {text for text in ids if fnmatch.fnmatchcase(text, pattern)}
    return matching or {text for text in ids if pattern in text or fnmatch.fnmatchcase(text, f"*{pattern}*")}


def _infer_layout(trace: Trace, tensor_id: TensorId, reference: Trace) -> list[Shard]:
    """Return the shards of an id, each with the layout that a check gives it."""
    shards = trace.shards[tensor_id]
    if trace is reference or all(shard.record.region is not None for shard in shards):
        return shards
    whole = LogicalTensor.of(reference, tensor_id)
    logical = LogicalTensor.of(trace, tensor_id, whole.shape) if whole is not None else None
    if logical is None:
        return shards
    known = [shard for piece in logical.pieces for replicas in piece.summands for shard in replicas]
    return sorted(known, key=lambda shard: (shard.coord.rank, shard.record.microbatch))


def _open_sides(folder: Path) -> list[tuple[str, Trace]]:
    sides = [side for side in ("reference", "candidate") if (folder / side).is_dir()]
    if sides:
        return [(side, Trace(folder / side)) for side in sides]
    trace = Trace(folder)
    return [(trace.manifest.role, trace)]


def _make_id_row(side: str, shards: list[Shard]) -> Row:
    record = shards[0].record
    return {
        "id": str(record.id),
        "side": side,
        "shape": record.region.shape if record.region else record.shape,
        "dtype": DTYPE_NAMES[record.dtype],
        "shards": len(shards),
        "layout": record.layout,
        "by": describe_provenance(record.by) or "nobody",
    }


def _make_shard_row(side: str, shard: Shard) -> Row:
    record = shard.record
    norm = float(shard.read_stored().flatten().double().norm())  # torch has no norm of more than 64 dims
    return {
        "id": str(record.id),
        "side": side,
        "where": str(shard.coord),
        "shape": record.shape,
        "region": str(record.region) if record.region else "unknown",
        "pending": list(record.pending),
        "layout": record.layout,
        "by": describe_provenance(record.by) or "nobody",
        "norm": norm if math.isfinite(norm) else None,
    }


def _format_cell(value: Any) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return json.dumps(value)
    return str(value)


def find_id(traces: Sequence[Trace], text: str, folder: Path) -> TensorId:
    """Find the id that equals the text, or the first that ends with it, such as one without step and outer modules.

    `folder` is the run's, for the message if there is none.
    """
    ids = {str(tensor_id): tensor_id for trace in traces for tensor_id in trace.shards}
    meant = next((known for known in ids if known == text or known.endswith((f"/{text}", f".{text}"))), None)
    if meant is not None:
        return ids[meant]
    sites, module = dict.fromkeys(str(tensor_id.site) for tensor_id in ids.values()), text.rpartition("/")[0]
    near = difflib.get_close_matches(text, sites, n=3) or [site for site in sites if module and module in site][:3]
    hint = f"Did you mean {', '.join(near)}?" if near else f"`ttrace show {shlex.quote(str(folder))}` lists all."
    raise TTraceError(f"{text!r} is not a tensor of this run. {hint}")
