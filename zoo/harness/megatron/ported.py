"""The case of ports: a model of transformers in one process, and the same model of megatron-core on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ttrace.ports.port_map import PortMap
from zoo.bug import Judge, Launcher
from zoo.harness.cells import Traced
from zoo.harness.megatron.ports import FAMILIES, Family, trace_candidates, trace_reference
from zoo.launch import TIMEOUT, Sided
from zoo.seen import Seen


@dataclass(frozen=True)
class Ported:
    """A family of models, and the layout of the candidate."""

    name: str
    layout: tuple[tuple[str, Any], ...] = (("tp", 2),)
    config: tuple[tuple[str, Any], ...] = ()
    """What the reference's config has beside what its family has."""
    prepare: Callable[[Any], None] | None = None
    """Done to the reference once it is built."""
    vocab: int = 0
    """The words of the reference, if they are fewer than the candidate's."""
    num_ranks: int = 2

    @property
    def family(self) -> Family:
        family = FAMILIES[self.name]
        return replace(family, config=(*family.config, *self.config), prepare=self.prepare)

    @property
    def launcher(self) -> Launcher:
        return on_ports


def on_ports(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """The launcher of ports: one launch for all runs that have the same reference."""
    together: dict[tuple[Family, int], list[int]] = {}
    for number, run in enumerate(runs):
        case = cast(Ported, run.case)
        together.setdefault((case.family, case.vocab), []).append(number)
    kept: dict[int, Seen] = {}
    for number, ((family, vocab), numbers) in enumerate(together.items()):
        found = _judge(num_ranks, family, vocab, [runs[i] for i in numbers], folder / str(number), judge)
        kept |= dict(zip(numbers, found, strict=True))
    return [kept[number] for number in range(len(runs))]


def _judge(num_ranks: int, family: Family, vocab: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    begin = time.monotonic()
    port = PortMap.load(family.port_map)
    trace_reference(family, folder, port, vocab=vocab)
    todo = [(str(run), dict(cast(Ported, run.case).layout), run.patch) for run in runs]
    timeout = TIMEOUT * (5 + len(runs))
    trace_candidates(num_ranks, family, todo, folder, port, vocab=vocab, timeout=timeout)
    seconds = (time.monotonic() - begin) / len(runs)
    kept = [judge(Traced(folder, folder / str(run))) for run in runs]
    return [replace(one, seconds=one.seconds + seconds) for one in kept]
