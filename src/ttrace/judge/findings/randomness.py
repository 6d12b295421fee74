"""Random numbers: they differ between layouts even in a correct candidate, and what follows from them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttrace.judge.verdict import Comparison, Finding
from ttrace.tensors.ids import ROOT, Kind, is_inside
from ttrace.trace.reader import Trace

_MOST_NAMED = 3


def describe_random_numbers(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Say which modules drew random numbers, for each side or for both."""
    sides = {"reference": reference.random, "candidate": candidate.random}
    drawing = [side for side, modules in sides.items() if modules]
    if len(drawing) == 2 and set(reference.random) == set(candidate.random):
        yield _describe_modules("reference and candidate", reference.random)
    else:
        yield from (_describe_modules(f"the {side}", sides[side]) for side in drawing)


def drop_random_findings(
    found: tuple[Finding, ...], comparisons: Sequence[Comparison], reference: Trace, candidate: Trace
) -> tuple[Finding, ...]:
    """Keep the findings that random numbers cannot explain: those before the first tensor that they may change."""
    places = {comparison.id: i for i, comparison in enumerate(comparisons)}
    spoiled = (i for i, comparison in enumerate(comparisons) if _is_spoiled(comparison, reference, candidate))
    first = next(spoiled, len(places))
    return tuple(finding for finding in found if places[finding.comparison.id] < first)


def _is_spoiled(comparison: Comparison, reference: Trace, candidate: Trace) -> bool:
    """Whether random numbers show in it: it is wrong, in a module that drew, or comes out of one in the reference.

    Where the reference draws, so do its twins. Tolerances are then so wide that the module passes, and what follows is
    wrong or right by chance (tests/capture/observe/test_rng_use.py::test_both_sides_are_told_in_one_sentence).
    """
    name = comparison.id.name
    if comparison.id.kind is Kind.OUTPUT and any(is_inside(name, module) for module in reference.random):
        return True
    return comparison.verdict.is_wrong and any(is_inside(name, m) for m in (*reference.random, *candidate.random))


def _describe_modules(sides: str, modules: Sequence[str]) -> str:
    named = ", ".join("the model itself" if name == ROOT else name for name in modules[:_MOST_NAMED])
    more = f" and {len(modules) - _MOST_NAMED} more modules" if len(modules) > _MOST_NAMED else ""
    return (
        f"{sides} drew random numbers in {named}{more}: what follows from them differs between layouts even if nothing "
        "is wrong. If that is F.dropout, or dropout_p of F.scaled_dot_product_attention, set it to 0 while tracing, "
        "or put the module into evaluation mode."
    )
