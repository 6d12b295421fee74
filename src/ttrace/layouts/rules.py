"""Rules: patterns over sites, each with a layout; the last match wins.

A pattern is a glob over `name/kind[.slot]`, `*` matching dots too: `layers.*.fc1/output`. Without a slot it speaks of
every slot, without a kind of every kind. A gradient that no rule names has the layout of what it is the gradient of,
without pending sums.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttrace.errors import LayoutError
from ttrace.layouts.layout import Layout
from ttrace.layouts.pattern import matches
from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.tensors.ids import Site
from ttrace.tensors.mesh import MICROBATCH_AXIS, Mesh


@dataclass(frozen=True)
class Rule:
    """Sites that match `pattern` have this layout."""

    pattern: str
    layout: Layout
    origin: str = ""
    source: LayoutSource = LayoutSource.RULE
    """Whether the user states it, or an adapter."""

    @property
    def provenance(self) -> Provenance:
        """What a placement says that this rule decided."""
        return Provenance(self.source, str(self))

    def matches(self, site: Site) -> bool:
        return matches(self.pattern, site)

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f'rule "{self.pattern}"{where}'


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules; the last match wins."""

    rules: tuple[Rule, ...] = ()
    _decided: dict[Site, Rule | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, rules: Mapping[str, str] | Path | str | None, origin: str = "") -> Rules:
        """Rules from a mapping of patterns to layouts in the notation, or from a TOML file with such a table."""
        if isinstance(rules, (Path, str)):
            return cls.of(_table(Path(rules)), origin=Path(rules).name)
        items = (rules or {}).items()
        return cls(tuple(Rule(pattern, _parsed(pattern, layout), origin) for pattern, layout in items))

    def decide(self, site: Site) -> Rule | None:
        """The rule that speaks for this site, or None."""
        if not self.rules:
            return None
        if site not in self._decided:
            self._decided[site] = self._last_match(site) or self._of_primal(site)
        return self._decided[site]

    def unused(self) -> list[Rule]:
        """Rules that matched nothing so far: probably a typo."""
        return [rule for rule in self.rules if not any(rule.matches(site) for site in self._decided)]

    def check(self, mesh: Mesh) -> None:
        """Refuse rules whose axes this mesh does not have; a single rank has every axis, with size 1."""
        if mesh.num_ranks == 1:
            return
        for rule in self.rules:
            try:
                mesh.check_one_factorisation(rule.layout.axes - {MICROBATCH_AXIS})
            except LayoutError as error:
                raise LayoutError(f"{rule}: {error}") from None

    def _last_match(self, site: Site) -> Rule | None:
        return next((rule for rule in reversed(self.rules) if rule.matches(site)), None)

    def _of_primal(self, site: Site) -> Rule | None:
        if site.kind.primal is site.kind:
            return None
        slot = "" if site.kind.is_of_param else site.slot  # optim.exp_avg follows param, which has no slot
        rule = self._last_match(Site(site.name, site.kind.primal, slot))
        return rule and replace(rule, layout=rule.layout.without_pending())


def _parsed(pattern: str, layout: str) -> Layout:
    try:
        return Layout.parse(layout)
    except LayoutError as error:
        raise LayoutError(f'rule "{pattern}": {error}') from None


def _table(path: Path) -> dict[str, str]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("layouts")
    except (OSError, ValueError, RecursionError) as error:
        raise LayoutError(f"rules file {path} cannot be read: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise LayoutError(
            f'rules file {path} needs a table [layouts] with lines like "*.fc1/output" = "batch hidden/tp".'
        )
    return table
