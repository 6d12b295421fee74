"""Communication of a candidate's ranks, by module: the ledger of a trace, as notes and findings read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ttrace.layouts.ids import Phase, drop_layers, is_inside
from ttrace.trace.collectives import Collective
from ttrace.trace.reader import Trace

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
"""The operations that add up the ranks' tensors."""


class LedgerFact(Enum):
    """What the ledger shows about a reduction that is missing, or was done too often, according to the values."""

    RAN = "ran"
    """A reduction that seems to be missing did run in the module itself."""
    TOO_OFTEN = "ran too often"
    """The reductions of a double reduction ran in the module itself."""
    IN_SIBLING = "in another layer"
    """The same module of another layer runs it, and this one does not."""
    OTHER_GROUP = "other group"
    """A reduction ran here, but over other ranks."""
    ABSENT = "absent"
    """No reduction ran here."""


@dataclass(frozen=True)
class LedgerEvidence:
    """What the ledger adds to a finding, with the lines of the ledger that show it."""

    fact: LedgerFact
    phase: Phase
    axis: str
    """The axis that the finding names; empty if it names none."""
    collectives: tuple[Collective, ...] = ()


class Communication:
    """The ledger of a candidate."""

    def __init__(self, candidate: Trace) -> None:
        self._trace = candidate
        self.by_rank = {rank.manifest.rank: rank.collectives for rank in candidate.ranks}

    @property
    def is_empty(self) -> bool:
        return not any(self.by_rank.values())

    @cached_property
    def modules(self) -> dict[str, str]:
        """All modules, each with its class."""
        return {name: info.type for rank in self._trace.ranks for name, info in rank.manifest.modules.items()}

    @cached_property
    def _by_module(self) -> dict[tuple[str, Phase], dict[int, list[Collective]]]:
        found: dict[tuple[str, Phase], dict[int, list[Collective]]] = {}
        for rank, entries in self.by_rank.items():
            for one in entries:
                found.setdefault((one.module, one.phase), {}).setdefault(rank, []).append(one)
        return found

    def list_of(self, module: str, phase: Phase) -> list[Collective]:
        """List what one rank issued in the module itself: the first rank that issued anything there."""
        of_ranks = self._by_module.get((module, phase), {})
        return of_ranks[min(of_ranks)] if of_ranks else []

    def list_inside(self, module: str, phase: Phase) -> list[Collective]:
        """List what one rank issued in the module, or in one inside it."""
        names = (name for name, at in self._by_module if at is phase and is_inside(name, module))
        return [one for name in dict.fromkeys(names) for one in self.list_of(name, phase)]

    def list_outside(self, phases: Iterable[Phase]) -> list[Collective]:
        """List what one rank issued in no module, or what torch issued to shard or average parameters."""
        wanted = set(phases)
        entries: Sequence[Collective] = next(filter(None, self.by_rank.values()), ())
        return [one for one in entries if one.phase in wanted and (not one.module or one.issuer in ("FSDP2", "DDP"))]

    def list_siblings(self, module: str) -> list[str]:
        """List the modules of other layers that have the same place and class as this one."""
        like, kind = drop_layers(module), self.modules.get(module)
        return [name for name, type_ in self.modules.items() if drop_layers(name) == like and type_ == kind]
