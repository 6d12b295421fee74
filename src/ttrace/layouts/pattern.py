"""Patterns over sites: the same globs in rules, in plans and on the command line."""

from __future__ import annotations

import fnmatch
import re
from functools import cache

from ttrace.layouts.ids import Site


def matches(pattern: str, site: Site) -> bool:
    """Whether a site matches a glob `name[/kind[.slot]]`; `*` matches dots too, an omitted part matches anything."""
    name, kind, slot = _compile_globs(pattern)
    return bool(kind.match(site.kind) and name.match(site.name) and slot.match(site.slot))


@cache
def _compile_globs(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    name, _, rest = pattern.partition("/")
    kind, _, slot = rest.partition(".")
    compiled = (re.compile(fnmatch.translate(glob)) for glob in (name, kind or "*", slot or "*"))
    return next(compiled), next(compiled), next(compiled)
