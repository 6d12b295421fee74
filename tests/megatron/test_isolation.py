"""Megatron's modules isolated: clean runs pass, and a fault spoils nothing but what holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tests.support.megatron_cases import BF16, gpt, llama, moe
from ttrace.capture.plan import Plan
from ttrace.judge.check import check
from ttrace.judge.verdict import Exit, Judgement
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.runtime import on_megatron
from zoo.harness.megatron.traced import Fault, trace
from zoo.harness.results import Outcome

if TYPE_CHECKING:
    from zoo.harness.megatron.models import Training

pytestmark = [pytest.mark.megatron, pytest.mark.nightly]

CASES = [
    gpt(tp=2, sp=True),
    gpt(pp=2, deallocate=True),
    gpt(zero=True, dtype=BF16),
    llama(cp=2),
    moe(ep=2),
]
FAULTY = "decoder.layers.1.mlp"


@dataclass(frozen=True)
class Isolated:
    clean: Outcome
    notes: tuple[str, ...]
    first: str
    spoilt: frozenset[str]


def references(case: Case, folder: Path) -> None:
    """On one rank: an ordinary and an isolated reference, with the one twin that isolation has."""
    alone = Plan(out=folder / "isolated" / "reference", reference=folder / "reference", isolated=True, stop=False)
    known = {"out": alone.out.parent / "twin-1", "role": "twin", "twin": 1, "reference": alone.out}
    trace(case, Plan(out=folder / "reference", stop=False))
    trace(case, alone)
    trace(case, alone.model_copy(update=known))


def candidate(case: Case, folder: Path, fault: Fault | None) -> Judgement:
    """On every rank: the ordinary run for its factor, then the isolated one."""
    ordinary = Plan(out=folder / "candidate", role="candidate", reference=folder / "reference", stop=False)
    trace(case, ordinary)
    dist.barrier()
    known = folder / "isolated"
    out = known / ("faulty" if fault else "candidate")
    update = {"out": out, "reference": known / "reference", "grad_factor": Trace(ordinary.out).grad_factor}
    trace(case, ordinary.model_copy(update={**update, "isolated": True}), fault)
    dist.barrier()
    return check(Trace(known / "reference"), [Trace(known / "twin-1")], Trace(out))


def all_references(folder: Path) -> None:
    for number, case in enumerate(CASES):
        references(case.reference, folder / str(number))


def all_candidates(folder: Path) -> list[Isolated]:
    found = []
    for number, case in enumerate(CASES):
        clean = candidate(case, folder / str(number), None)
        wrong = candidate(case, folder / str(number), scaled)
        spoilt = {c.id.name for c in wrong.comparisons if c.verdict.is_wrong and c.id.kind is Kind.OUTPUT}
        found.append(Isolated(Outcome.of(clean), clean.notes, wrong.findings[0].module, frozenset(spoilt)))
    return found


@contextmanager
def scaled(training: Training) -> Iterator[None]:
    """One layer's MLP gives too much."""
    for layer in (module for chunk in training.chunks for module in chunk.modules()):
        if getattr(layer, "layer_number", None) == 2 and hasattr(layer, "mlp"):
            layer.mlp.forward = more(layer.mlp.forward)
    yield


def more(forward: Callable[..., Any]) -> Callable[..., Any]:
    def given(*args: Any, **kwargs: Any) -> Any:
        output, bias = forward(*args, **kwargs)
        return output * 1.5, bias

    return given


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Isolated]:
    folder = tmp_path_factory.mktemp("isolated")
    on_megatron(1, all_references, folder)
    found: list[Isolated] = on_megatron(2, all_candidates, folder)[0]
    return found


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_isolated_modules_are_right_by_themselves(results: list[Isolated], number: int) -> None:
    result = results[number]
    assert result.clean.exit is Exit.PASSED, result.clean.trouble
    assert not any("could not be isolated" in note for note in result.notes), result.notes


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_fault_spoils_only_what_holds_it(results: list[Isolated], number: int) -> None:
    assert results[number].first == FAULTY
    assert results[number].spoilt - {"decoder.layers.1"} == {FAULTY}
    if CASES[number].dtype == "float32":  # in bf16 half an MLP may be within what rounding does to the residual
        assert "decoder.layers.1" in results[number].spoilt
