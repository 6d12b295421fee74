"""Rules: patterns over sites, each with a layout; the last match wins.

A pattern is a glob over `name/kind[.slot]`, and `*` matches dots too: `layers.*.fc1/output`. Without a slot it matches
every slot, and without a kind every kind. A gradient that no rule matches has the layout of the tensor it belongs to,
without pending sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttrace.errors import LayoutError
from ttrace.files import read_settings
from ttrace.layouts.ids import Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import MICROBATCH_AXIS, Mesh
from ttrace.layouts.pattern import matches
from ttrace.layouts.source import LayoutSource, Provenance
from ttrace.untrusted import parse_toml


@dataclass(frozen=True)
class Rule:
    """A rule: sites that match `pattern` have this layout."""

    pattern: str
    layout: Layout
    origin: str = ""
    source: LayoutSource = LayoutSource.RULE
    """Whether the user or an adapter states the rule."""

    @property
    def provenance(self) -> Provenance:
        """The provenance of placements that this rule decides."""
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
    _decisions: dict[Site, Rule | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, rules: Mapping[str, str] | Path | str | None, origin: str = "") -> Rules:
        """Make rules from a mapping of patterns to layouts in the notation, or from a TOML file with such a table."""
        if isinstance(rules, (Path, str)):
            return cls.of(read_table(Path(rules)), origin=Path(rules).name)
        items = (rules or {}).items()
        return cls(tuple(Rule(pattern, _parse_layout(pattern, layout), origin) for pattern, layout in items))

    def decide(self, site: Site) -> Rule | None:
        """Return the rule that decides this site; None if there is none."""
        if not self.rules:
            return None
        if site not in self._decisions:
            self._decisions[site] = self._find_last_match(site) or self._match_primal(site)
        return self._decisions[site]

    def list_unused(self) -> list[Rule]:
        """List the rules that have matched nothing so far: probably a typo."""
        return [rule for rule in self.rules if not any(rule.matches(site) for site in self._decisions)]

    def check(self, mesh: Mesh) -> None:
        """Refuse rules whose axes this mesh does not have; a single rank has every axis, with size 1."""
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
    try:
        table = parse_toml(read_settings(path), path).get("layouts")
    except (OSError, ValueError, RecursionError) as error:
        raise LayoutError(
            f"rules file {path} cannot be read: {error}. Give the path of a TOML file with a table [layouts]."
        ) from None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise LayoutError(
            f'rules file {path} needs a table [layouts] with lines like "*.fc1/output" = "batch hidden/tp".'
        )
    return table
