"""This module says what random numbers spoil: what a module draws differs between layouts by right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttrace.judge.verdict import Comparison, Finding
from ttrace.tensors.ids import ROOT, TensorId, is_inside
from ttrace.trace.reader import Trace

_MOST_NAMED = 3


def random_problems(reference: Trace, candidate: Trace) -> Iterator[str]:
    """One sentence for the modules that drew random numbers in each side, or in both alike."""
    sides = {"reference": reference.random, "candidate": candidate.random}
    drawing = [side for side, modules in sides.items() if modules]
    if len(drawing) == 2 and set(reference.random) == set(candidate.random):
        yield _problem("reference and candidate", reference.random)
    else:
        yield from (_problem(f"the {side}", sides[side]) for side in drawing)


def before_random(
    found: tuple[Finding, ...], comparisons: Sequence[Comparison], reference: Trace, candidate: Trace
) -> tuple[Finding, ...]:
    """The findings that random numbers cannot explain: those before the first wrong tensor in a module that drew."""
    drew = {*reference.random, *candidate.random}
    places = {comparison.id: i for i, comparison in enumerate(comparisons)}
    wrong = (c.id for c in comparisons if c.verdict.is_wrong and any(_is_within(c.id, name) for name in drew))
    first = next((places[tensor_id] for tensor_id in wrong), len(places))
    return tuple(finding for finding in found if places[finding.comparison.id] < first)


def _problem(sides: str, modules: Sequence[str]) -> str:
    named = ", ".join("the model itself" if name == ROOT else name for name in modules[:_MOST_NAMED])
    more = f" and {len(modules) - _MOST_NAMED} more modules" if len(modules) > _MOST_NAMED else ""
    return (
        f"{sides} drew random numbers in {named}{more}: what comes of them differs between layouts by right. If that "
        "is F.dropout, or dropout_p of F.scaled_dot_product_attention, set it to 0 while tracing, or put the module "
        "into evaluation mode."
    )


def _is_within(tensor_id: TensorId, module: str) -> bool:
    return is_inside(tensor_id.name, module)
