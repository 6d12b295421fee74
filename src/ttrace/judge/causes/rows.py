"""Causes that rows of a tensor show: some of them are wrong, weighted unevenly, or all have one row added."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from ttrace.judge.causes.evidence import MOST_OF_ERROR, MOST_TOLERANCES, Block, Evidence, cause
from ttrace.judge.causes.formulas import count_part
from ttrace.judge.tensors.difference import name_by_axis
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.tensors.values import Values, measure_common_row, sketch_rows
from ttrace.judge.verdict import Cause, CauseName
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.ranges import Ranges
from ttrace.values.stats import LEAST_DIVISOR

_MEAN = ", as in a mean of means over parts of different sizes"
_MOST_NAMED = 4

Run = tuple[torch.Tensor, float]
"""Indices that have one weight, and that weight."""
_MOST_SPANS = 4
"""With more runs of neighbours, their number and their ranks are named instead."""


@cause(
    CauseName.SOME_ROWS,
    shown_by="only some indices of a dim are wrong",
    bug="first-rows-lost",
)
def find_wrong_rows(evidence: Evidence) -> Cause | None:
    """Find a few wrong indices of one dim, if all other indices are right."""
    for dim, sums in evidence.row_sums.items():
        a, d = sums.aa, sums.dd
        size = len(a)
        if size < 3:
            continue
        # A small row has the rounding errors of the larger ones.
        is_wrong = d > (MOST_TOLERANCES * evidence.tolerance) ** 2 * a.clamp_min(float(a.mean()))
        wrong = is_wrong.nonzero().flatten()
        rest = math.sqrt(float(d[~is_wrong].sum()) / max(float(a.sum()), LEAST_DIVISOR))
        is_rest_right = rest <= min(evidence.tolerance, MOST_OF_ERROR * evidence.stats.error)
        if 0 < len(wrong) <= size // 3 and is_rest_right and not _is_whole_shards(evidence, dim, wrong):
            which = f"{name_indices(evidence, dim, wrong)}{_describe_edge(evidence, dim, wrong)}"
            return Cause(
                CauseName.SOME_ROWS,
                f"only {_describe_count(len(wrong), size, dim)} wrong: {which}",
                evidence=(f"without {'it' if len(wrong) == 1 else 'them'} the error is {rest:.1e}",),
            )
    return None


@cause(
    CauseName.UNEVEN_WEIGHTS,
    shown_by="runs of indices, or what single ranks hold, are the reference times a number each, as in a mean of means",
    bug="local-map-uneven",
)
def find_uneven_weights(evidence: Evidence) -> Cause | None:
    """Find runs of indices of one dim that are the reference times a number each, none of which is 1.

    Rows that are zero on both sides, such as masked tokens, have no weight.
    """
    for dim, sums in evidence.row_sums.items():
        live = ((sums.aa > 0) | (sums.bb > 0)).nonzero().flatten()
        if len(live) < 3 or evidence.stats.count // len(sums.aa) < 4:
            continue  # a factor for a few numbers proves nothing
        weights = sums.ab / sums.aa.clamp_min(LEAST_DIVISOR)
        runs = _find_runs(live, weights[live], MOST_TOLERANCES * evidence.tolerance)
        is_uneven = 2 <= len(runs) <= len(live) // 2 and all(
            abs(weight - 1) > MOST_TOLERANCES * evidence.tolerance for _, weight in runs
        )
        rest = evidence.measure_rest(partial(_weight, dim, weights)) if is_uneven else math.inf
        if evidence.is_explained_error(rest):
            ending = _MEAN if _is_mean_of_means(_count_tokens(evidence, dim), runs, evidence.tolerance) else ""
            return Cause(
                CauseName.UNEVEN_WEIGHTS,
                f"indices of dim {dim} do not count alike: {_name_runs(evidence, dim, runs)}{ending}",
                evidence=(f"weighted so, the error is {rest:.1e}",),
            )
    return None


@cause(
    CauseName.BIAS,
    kinds=(Kind.OUTPUT,),
    shown_by="one row too much, the same everywhere; how often the module's own bias it is",
    bug="bias-on-every-rank",
)
def find_bias(evidence: Evidence) -> Cause | None:
    """Find one row that was added or left out everywhere: a bias."""
    shape = evidence.reference.shape
    if len(shape) < 2 or evidence.stats.count // shape[-1] < 2:
        return None
    if evidence.num_buckets:
        return _find_own_bias(evidence.linear)
    if evidence.values is None:
        return None
    row, rest = measure_common_row(*evidence.values)
    if not evidence.is_explained_error(rest):
        return None
    return Cause(
        CauseName.BIAS,
        f"the candidate is the reference plus one row, the same everywhere{_describe_multiple(evidence, row)}",
        evidence=(f"without that row the error is {rest:.1e}",),
    )


def name_indices(evidence: Evidence, dim: int, indices: torch.Tensor) -> str:
    """Name indices as spans; if there are many, by their number and the ranks that hold them."""
    spans = _find_spans(indices)
    if len(spans) <= _MOST_SPANS:
        return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    numbers = indices.unique()
    who = name_holders(evidence, dim, numbers)
    return f"{len(numbers)} between {int(numbers[0])} and {int(numbers[-1])}{f', of {who}' if who else ''}"


def name_holders(evidence: Evidence, dim: int, indices: torch.Tensor) -> str:
    """Name the ranks that hold these indices; empty if all ranks do, or if ranks do not hold ranges of indices."""
    if any(piece.region.flat is not None for piece in evidence.candidate.pieces):
        return ""
    wanted, all_ranks, holders = set(indices.tolist()), set[int](), set[int]()
    for piece in evidence.candidate.pieces:
        all_ranks.update(piece.ranks)
        if any(index in wanted for start, stop in piece.region.dims[dim] for index in range(start, stop)):
            holders.update(piece.ranks)
    return name_by_axis(holders, all_ranks, evidence.mesh)[0] if holders < all_ranks else ""


def _find_spans(indices: torch.Tensor) -> list[tuple[int, int]]:
    """Find runs of neighbouring indices, each as its first and last."""
    spans: list[tuple[int, int]] = []
    for index in indices.tolist():
        if spans and index == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return spans


def _is_whole_shards(evidence: Evidence, dim: int, wrong: torch.Tensor) -> bool:
    """Whether these are exactly the indices of some ranks: then find_wrong_ranks names the ranks."""
    held = {piece.region.dims[dim] for piece in evidence.candidate.pieces if piece.region.flat is None}
    found = set(wrong.tolist())
    inside = [set(ranges_of) for ranges in held if (ranges_of := _list_indices(ranges)) and set(ranges_of) <= found]
    return len(held) > 1 and set().union(*inside) == found


def _list_indices(ranges: Ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def _describe_count(wrong: int, size: int, dim: int) -> str:
    return f"{wrong} of {size} indices of dim {dim} {'is' if wrong == 1 else 'are'}"


def _describe_edge(evidence: Evidence, dim: int, wrong: torch.Tensor) -> str:
    """Describe whether the wrong indices are the first or last of shards; empty if they are neither."""
    held = {piece.region.dims[dim] for piece in evidence.candidate.pieces if piece.region.flat is None}
    if len(held) < 2:
        return ""
    found = set(wrong.tolist())
    for word, edge in (("first", {ranges[0][0] for ranges in held}), ("last", {ranges[-1][1] - 1 for ranges in held})):
        if found and found <= edge:
            return f", the {word} of {'each shard' if found == edge else 'a shard'}"
    return ""


def _weight(dim: int, weights: torch.Tensor, block: Block) -> torch.Tensor:
    return block.theirs - block.take(weights, dim) * block.ours


def _find_runs(indices: torch.Tensor, weights: torch.Tensor, tolerance: float) -> list[Run]:
    borders = ((weights.diff().abs() > tolerance).nonzero().flatten() + 1).tolist()
    spans = itertools.pairwise([0, *borders, len(weights)])
    return [(indices[start:stop], float(weights[start:stop].mean())) for start, stop in spans]


def _count_tokens(evidence: Evidence, dim: int) -> torch.Tensor:
    """Count the vectors of each index that are not zero."""
    tokens = torch.zeros(evidence.reference.shape[dim], dtype=torch.int64, device="cpu")
    for block in evidence.blocks():
        rows = block.ours.movedim(dim, 0)
        live = rows.flatten(1, -2).any(-1).sum(1) if rows.ndim > 2 else rows.any(1).to(torch.int64)
        tokens[slice(*block.bounds[dim])] += live
    return tokens


def _is_mean_of_means(tokens: torch.Tensor, runs: list[Run], tolerance: float) -> bool:
    """Whether all runs have the same share, and the shares sum to the whole; tokens that are zero do not count."""
    total = int(tokens.sum())
    shares = [int(tokens[run].sum()) * weight for run, weight in runs]
    is_same = max(shares) - min(shares) <= MOST_TOLERANCES * tolerance * total
    return is_same and math.isclose(sum(shares), total, rel_tol=MOST_OF_ERROR)


def _name_runs(evidence: Evidence, dim: int, runs: list[Run]) -> str:
    """Name each run by the ranks that hold it if every run has its own ranks, otherwise by its indices."""
    holders = [name_holders(evidence, dim, run) for run, _ in runs]
    if all(holders) and len(set(holders)) == len(holders):
        names = [f"those of {who}" for who in holders]
    else:
        names = [name_indices(evidence, dim, run) for run, _ in runs]
    words = [f"{name} count {weight:.4g} x" for name, (_, weight) in zip(names, runs, strict=True)]
    more = f" and {len(words) - _MOST_NAMED} further runs" if len(words) > _MOST_NAMED else ""
    return f"{', '.join(words[:_MOST_NAMED])}{more}"


def _find_own_bias(evidence: Evidence) -> Cause | None:
    """Find the module's own bias, added too often or left out, in sketches: a sketch of it can be computed."""
    name, own = _find_bias(evidence)
    if own is None or evidence.values is None:
        return None
    sketch = sketch_rows(own.tensor(), evidence.reference.shape, evidence.num_buckets)
    count, rest = count_part(evidence, Values.of_numbers(sketch))
    if not count:
        return None
    return Cause(
        CauseName.BIAS,
        f"the candidate is the reference plus one row, the same everywhere{_describe_count_of(name, count)}",
        evidence=(f"without that row the error is {rest:.1e}",),
    )


def _describe_multiple(evidence: Evidence, row: torch.Tensor) -> str:
    """Describe how many times the module's own bias the row is; empty if it is no multiple of it."""
    name, own = _find_bias(evidence)
    if own is None:
        return ""
    values = own.tensor().to(torch.float64)
    count = round(float(values @ row / (values @ values).clamp_min(LEAST_DIVISOR)))
    if count == 0 or float((count * values - row).norm()) > MOST_OF_ERROR * float((count * values).norm()):
        return ""
    return _describe_count_of(name, count)


def _find_bias(evidence: Evidence) -> tuple[str, LogicalTensor | None]:
    """Find the module's own bias: its name and, if the reference has it, its value."""
    name = f"{evidence.comparison.id.name}.bias"
    own = LogicalTensor.of(evidence.reference_trace, TensorId.of(evidence.comparison.id.step, None, name, Kind.PARAM))
    return name, own if own is not None and own.shape == evidence.reference.shape[-1:] else None


def _describe_count_of(name: str, count: int) -> str:
    often = "once" if count == 1 else f"{count} times"
    return f": {name}, added {often} too often" if count > 0 else f": {name}, left out"
