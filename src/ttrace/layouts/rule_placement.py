"""Placement of a tensor by a rule, with an error if the rule's layout does not fit what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping

from ttrace.errors import LayoutError
from ttrace.layouts.ids import Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Shape
from ttrace.layouts.rules import Rule


def apply_rule(
    rule: Rule, site: Site, local: Shape, shape: Shape | None, *, sizes: Mapping[str, int], where: Mapping[str, int]
) -> Placement:
    """Place a tensor of shape `local`; `shape` is the reference's, or None if the reference has no such tensor."""
    try:
        layout = rule.layout.of_rank(len(local))
    except LayoutError as error:
        raise LayoutError(f"{site}: {rule}: {error}") from None
    logical = layout.global_shape(local, sizes) if shape is None else shape
    if len(logical) != len(local) or layout.local_shape(logical, sizes, where) != local:
        raise LayoutError(_explain_misfit(site, rule, local, logical, sizes))
    return Placement(layout.region(logical, sizes, where), layout.pending, str(rule.layout), rule.provenance)


def _explain_misfit(site: Site, rule: Rule, local: Shape, logical: Shape, sizes: Mapping[str, int]) -> str:
    cuts = _describe_cuts(rule.layout, sizes)
    return (
        f"{site}: {rule} says {str(rule.layout)!r}, which cuts {cuts or 'no dim'}, but this rank holds shape "
        f"{local} of the reference's {logical}. State the axes that do cut this tensor, or drop those that do not."
    )


def _describe_cuts(layout: Layout, sizes: Mapping[str, int]) -> str:
    words = [f"dim {dim.name} over {cut.axis}={sizes.get(cut.axis, 1)}" for dim in layout.dims for cut in dim.cuts]
    return " and ".join(words)
