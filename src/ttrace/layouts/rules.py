"""Rules: patterns over sites, each with a layout. If several match, the last one applies.

A pattern is a glob over `name/kind[.slot]`, and `*` matches dots too: `layers.*.fc1/output`. Without a slot it matches
every slot, and without a kind every kind. A gradient that no rule matches has the layout of the tensor it belongs to,
without pending sums.

`matches` is also used for the patterns of plans and of the command line. `apply_rule` computes the region that a rule
gives to a tensor, or raises an error that explains why the layout does not fit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ttrace.errors import LayoutError
from ttrace.layouts.ids import Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.layouts.placement import LayoutSource, Placement, Provenance
from ttrace.layouts.region import Shape
from ttrace.untrusted import load_settings


@dataclass(frozen=True)
class Rule:
    """A rule: sites that match `pattern` have this layout."""

    pattern: str
    layout: Layout
    origin: str = ""
    source: LayoutSource = LayoutSource.RULE
    """Whether the user or an adapter stated the rule."""

    @property
    def provenance(self) -> Provenance:
        """The provenance of placements that follow from this rule."""
        return Provenance(self.source, str(self))

    def matches(self, site: Site) -> bool:
        return matches(self.pattern, site)

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f'rule "{self.pattern}"{where}'


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules; the last that matches applies."""

    rules: tuple[Rule, ...] = ()
    _decisions: dict[Site, Rule | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, rules: Mapping[str, str] | Path | str | None, origin: str = "") -> Rules:
        """Make rules from a mapping of patterns to layouts, or from a TOML file with such a table."""
        if isinstance(rules, (Path, str)):
            return cls.of(read_table(Path(rules)), origin=Path(rules).name)
        items = (rules or {}).items()
        return cls(tuple(Rule(pattern, _parse_layout(pattern, layout), origin) for pattern, layout in items))

    def decide(self, site: Site) -> Rule | None:
        """Return the rule that applies to this site; None if there is none."""
        if not self.rules:
            return None
        if site not in self._decisions:
            self._decisions[site] = self._find_last_match(site) or self._match_primal(site)
        return self._decisions[site]

    def list_unused(self) -> list[Rule]:
        """List the rules that have not matched any site so far, which usually means a typo."""
        return [rule for rule in self.rules if not any(rule.matches(site) for site in self._decisions)]

    def check(self, mesh: Mesh) -> None:
        """Raise an error for rules with axes that the mesh does not have; for a single rank, every axis has size 1."""
        if mesh.num_ranks == 1:
            return
        for rule in self.rules:
            try:
                mesh.check_one_factorisation(rule.layout.axes - {MICROBATCH_AXIS})
            except LayoutError as error:
                raise LayoutError(f"{rule}: {error}") from None

    def _find_last_match(self, site: Site) -> Rule | None:
        return next((rule for rule in reversed(self.rules) if rule.matches(site)), None)

    def _match_primal(self, site: Site) -> Rule | None:
        if site.kind.primal is site.kind:
            return None
        slot = "" if site.kind.is_of_param else site.slot  # optim.exp_avg follows param, which has no slot
        rule = self._find_last_match(Site(site.name, site.kind.primal, slot))
        return rule and replace(rule, layout=rule.layout.without_pending())


def _parse_layout(pattern: str, layout: str) -> Layout:
    try:
        return Layout.parse(layout)
    except LayoutError as error:
        raise LayoutError(f'rule "{pattern}": {error}') from None


def read_table(path: Path) -> dict[str, str]:
    """Read the table of a rules file: patterns and their layouts."""
    advice = 'It needs a table [layouts] with lines like "*.fc1/output" = "batch hidden/tp".'
    return load_settings("rules", path, _find_table, advice=advice, error_type=LayoutError)


def _find_table(file: Mapping[str, Any]) -> dict[str, str]:
    table = file.get("layouts")
    if not isinstance(table, dict) or not all(isinstance(layout, str) for layout in table.values()):
        raise ValueError("it has no table [layouts] of texts")
    return table


def matches(pattern: str, site: Site) -> bool:
    """Return whether a site matches a glob `name[/kind[.slot]]`; `*` matches dots too; omitted parts match all."""
    name, kind, slot = _compile_globs(pattern)
    return bool(kind.match(site.kind) and name.match(site.name) and slot.match(site.slot))


@cache
def _compile_globs(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    name, _, rest = pattern.partition("/")
    kind, _, slot = rest.partition(".")
    compiled = (re.compile(fnmatch.translate(glob)) for glob in (name, kind or "*", slot or "*"))
    return next(compiled), next(compiled), next(compiled)


def apply_rule(
    rule: Rule, site: Site, local: Shape, shape: Shape | None, *, sizes: Mapping[str, int], where: Mapping[str, int]
) -> Placement:
    """Place a tensor of shape `local` by a rule; `shape` is the reference's, or None if it does not have the tensor."""
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
        f"{site}: {rule} states {str(rule.layout)!r}, which cuts {cuts or 'no dim'}, but this rank holds shape "
        f"{local} of the reference's {logical}. State the axes that do cut this tensor, or drop those that do not."
    )


def _describe_cuts(layout: Layout, sizes: Mapping[str, int]) -> str:
    words = [f"dim {dim.name} over {cut.axis}={sizes.get(cut.axis, 1)}" for dim in layout.dims for cut in dim.cuts]
    return " and ".join(words)
