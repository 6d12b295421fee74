"""The case of Megatron's entries: a model on an unmodified wheel, in its own processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from zoo.bug import Judge
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.traced import Fault, judgements
from zoo.harness.megatron.wheels import NEWEST
from zoo.launch import TIMEOUT, Sided
from zoo.seen import Seen


@dataclass(frozen=True)
class OnWheel:
    """The launcher of one version: equal ones share a launch."""

    version: str

    def __call__(self, num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
        cases = [cast(Released, run.case).model for run in runs]
        faults = [cast(Fault | None, run.patch) for run in runs]
        timeout = TIMEOUT * (5 + len(runs))
        found = judgements(num_ranks, cases, folder, judge, version=self.version, faults=faults, timeout=timeout)
        return [replace(one.kept, seconds=one.kept.seconds + one.seconds) for one in found]


@dataclass(frozen=True)
class Released:
    """A model and its layout, on a release and so many ranks."""

    model: Case
    num_ranks: int = 2
    version: str = NEWEST

    @property
    def launcher(self) -> OnWheel:
        return OnWheel(self.version)


def dense(num_ranks: int = 2, version: str = NEWEST, **settings: Any) -> Released:
    """Return a GPT of two layers, with the settings that differ from the defaults."""
    return Released(Case(**{"layers": 2, **settings}), num_ranks, version)


def moe(num_ranks: int = 2, version: str = NEWEST, **settings: Any) -> Released:
    """The same with four experts."""
    return dense(num_ranks, version, experts=4, bias=False, **settings)
