"""Random numbers: they may differ between layouts even in a correct candidate, and what follows from them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttrace.judge.verdict import Comparison, Finding, Verdict
from ttrace.layouts.ids import ROOT, Kind, is_inside
from ttrace.trace.reader import Trace

_MOST_NAMED = 3
_CLOSE = 0.05
"""Other random numbers change the output of a module that draws by more than this, relative to its size."""


@dataclass(frozen=True)
class Draws:
    """The modules of each side that drew random numbers, without those that drew the same on both sides."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


def find_draws(comparisons: Sequence[Comparison], reference: Trace, candidate: Trace) -> Draws:
    """Find the modules that drew. Where an output agrees closely, in twins too, all drew the same numbers."""
    outputs: dict[str, bool] = {}
    for comparison in comparisons:
        if comparison.id.kind is Kind.OUTPUT:
            outputs[comparison.id.name] = outputs.get(comparison.id.name, True) and _agrees_closely(comparison)
    sides = (tuple(name for name in trace.random if not outputs.get(name, False)) for trace in (reference, candidate))
    return Draws(*sides)


def _agrees_closely(comparison: Comparison) -> bool:
    tolerance = comparison.tolerance
    return comparison.verdict is Verdict.PASS and tolerance is not None and tolerance.value < _CLOSE


def describe_random_numbers(draws: Draws) -> Iterator[str]:
    """Say which modules drew random numbers, for each side or for both."""
    sides = {"reference": draws.reference, "candidate": draws.candidate}
    drawing = [side for side, modules in sides.items() if modules]
    if len(drawing) == 2 and set(draws.reference) == set(draws.candidate):
        yield _describe_modules("reference and candidate", draws.reference)
    else:
        yield from (_describe_modules(f"the {side}", sides[side]) for side in drawing)


def drop_random_findings(
    found: tuple[Finding, ...], comparisons: Sequence[Comparison], draws: Draws
) -> tuple[Finding, ...]:
    """Keep the findings that random numbers cannot explain: those before the first tensor that they may change."""
    places = {comparison.id: i for i, comparison in enumerate(comparisons)}
    spoiled = (i for i, comparison in enumerate(comparisons) if _is_spoiled(comparison, draws))
    first = next(spoiled, len(places))
    return tuple(finding for finding in found if places[finding.comparison.id] < first)


def _is_spoiled(comparison: Comparison, draws: Draws) -> bool:
    """Whether random numbers show in it: it is wrong, in a module that drew, or comes out of one in the reference.

    Where the reference draws, so do its twins. Tolerances are then so wide that the module passes, and what follows is
    wrong or right by chance (tests/capture/observe/test_rng_use.py::test_both_sides_are_told_in_one_sentence).
    """
    name = comparison.id.name
    if comparison.id.kind is Kind.OUTPUT and any(is_inside(name, module) for module in draws.reference):
        return True
    return comparison.verdict.is_wrong and any(is_inside(name, m) for m in (*draws.reference, *draws.candidate))


def _describe_modules(sides: str, modules: Sequence[str]) -> str:
    named = ", ".join("the model itself" if name == ROOT else name for name in modules[:_MOST_NAMED])
    more = f" and {len(modules) - _MOST_NAMED} more modules" if len(modules) > _MOST_NAMED else ""
    return (
        f"{sides} drew random numbers in {named}{more}: what follows from them differs between layouts even if nothing "
        "is wrong. If that is F.dropout, or dropout_p of F.scaled_dot_product_attention, set it to 0 while tracing, "
        "or put the module into evaluation mode."
    )
