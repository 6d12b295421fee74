"""Real silent bugs of unmodified megatron-core wheels are found, where they are and for what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.megatron_cpu.case import Case
from tests.support.megatron_cpu.traced import Fault, outcomes
from ttrace.judge.verdict import Exit, Judgement
from zoo.harness.results import Outcome

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]


def dense(**settings: Any) -> Case:
    return Case(**{"layers": 2, **settings})


def moe(**settings: Any) -> Case:
    return dense(experts=4, bias=False, **settings)


def mla(**settings: Any) -> Case:
    return dense(mla=True, rmsnorm=True, tied=False, bias=False, layers=4, **settings)


@contextmanager
def received_as_sent(_: object) -> Iterator[None]:
    """Receives are posted in the order in which the only other stage sends: gradients first."""
    posted = dist.batch_isend_irecv

    def reordered(operations: list[Any]) -> Any:
        sends = [operation for operation in operations if operation.op is dist.isend]
        receives = [operation for operation in operations if operation.op is dist.irecv]
        return posted([*sends, *reversed(receives)])

    dist.batch_isend_irecv = reordered  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = posted


@dataclass(frozen=True)
class Run:
    """A case on an unmodified wheel, and the first finding that it has; none if it is right."""

    version: str
    num_ranks: int
    case: Case
    site: str = ""
    cause: str = ""
    axis: str | None = None
    words: str = ""
    """What the cause's sentence says, among others."""
    fault: Fault | None = None
    """What is changed of the wheel, to show the cause."""

    @property
    def name(self) -> str:
        return f"{self.version}-{self.case.name}{'-repaired' if self.fault else ''}"


ROUTER = "decoder.layers.1.mlp.router/loss.0"
VPP = dense(pp=2, vpp=2, layers=4, batched_p2p=True)
RUNS = [
    # Gradients are averaged over dp and summed over dp x cp (Megatron-LM issue 906).
    Run("0.8.0", 2, dense(cp=2), "embedding.word_embeddings.weight/param_grad", "double reduction", "cp"),
    Run("0.8.0", 2, dense(tp=2, sp=True)),
    # Stages own other parts of a tied embedding, and sum reduced with unreduced gradients (issues 656, 844).
    Run(
        "0.5.0",
        4,
        dense(pp=2, zero=True),
        "embedding.word_embeddings.weight/param_grad",
        "tied copies",
        words="a copy in another module",
    ),
    Run("0.5.0", 4, dense(pp=2)),
    Run("0.5.0", 4, dense(pp=2, zero=True, tied=False)),
    # Layers are divided by stages, and the remainder is dropped (issue 468).
    Run(
        "0.10.0",
        2,
        dense(pp=2, layers=5),
        "decoder/output",
        "missing modules",
        words="the candidate has no decoder.layers.4",
    ),
    Run("0.10.0", 2, dense(pp=2, layers=4)),
    # The dispatcher brings tokens back by counts of another shape.
    Run("0.11.0", 4, moe(tp=2, sp=True, ep=2), "decoder.layers.0.mlp/output.0", "some ranks"),
    Run("0.11.0", 4, moe(tp=2, sp=True, ep=2, dispatcher="allgather")),
    # Each rank of tp has the auxiliary loss of all tokens, and their gradients are summed (commit cac8d1a3f0).
    Run("0.6.0", 2, moe(tp=2, sp=True), ROUTER, "double reduction", "tp"),
    Run("0.6.0", 2, moe(tp=2, sp=True, aux_loss=0.0)),
    # The loss is multiplied by cp before gradients are averaged over dp x cp, the auxiliary loss is not (PR 2237).
    Run("0.13.0", 2, moe(cp=2), ROUTER, "constant factor", "cp", "0.5 x the reference: scaled by 1/cp"),
    Run("0.16.1", 2, moe(cp=2)),
    # It is multiplied by the tokens of this rank, not of the whole sequence (PR 5047).
    Run("0.16.1", 2, moe(tp=2, sp=True, per_token=True), ROUTER, "constant factor", "tp", "scaled by 1/tp"),
    Run("0.16.1", 2, moe(tp=2, sp=True)),
    # Summing a tensor that is not contiguous sums a copy of it (PR 5338).
    Run("0.16.1", 2, dense(tp=2, custom="transposed"), "decoder.layers.0.mlp/output.0", "missing all-reduce", "tp"),
    Run("0.16.1", 2, dense(tp=2, custom="contiguous")),
    # Keys' rotary part is gathered, and its gradient taken from one rank's heads only (issue 1699).
    Run(
        "0.16.1",
        2,
        mla(tp=2),
        "decoder.layers.3.self_attention/grad_input",
        "some rows",
        words="linear_kv_down_proj is wrong (grad_output): only 4 of 20 indices of dim 2 are wrong: 16-19",
    ),
    Run("0.16.1", 2, mla()),
    # Both neighbours of a stage are one rank: its gradient arrives as an activation (docs/found/batched-p2p.md).
    Run(
        "0.16.1",
        2,
        VPP,
        "decoder/grad_input.hidden_states",
        "another's values",
        words="what arrived is 0/2/decoder.layers.0/output.0 of the reference",
    ),
    Run("0.16.1", 2, VPP, fault=received_as_sent),
]


@dataclass(frozen=True)
class Found:
    """What is kept of a judgement."""

    outcome: Outcome
    site: str
    cause: str
    axis: str | None
    sentence: str

    @classmethod
    def of(cls, judgement: Judgement) -> Found:
        if not judgement.findings:
            return cls(Outcome.of(judgement), "", "", None, "")
        first = judgement.findings[0]
        site, cause = str(first.comparison.id.site), first.cause
        return cls(Outcome.of(judgement), site, cause.name, cause.axis, cause.sentence)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """All runs, those of one version on as many ranks in one launch."""
    results: dict[str, Found] = {}
    for version, num_ranks in dict.fromkeys((run.version, run.num_ranks) for run in RUNS):
        runs = [run for run in RUNS if (run.version, run.num_ranks) == (version, num_ranks)]
        folder = tmp_path_factory.mktemp(f"{version}-{num_ranks}")
        cases, faults = [run.case for run in runs], [run.fault for run in runs]
        kept = outcomes(num_ranks, cases, folder, version=version, faults=faults, keep=Found.of)
        results |= dict(zip((run.name for run in runs), kept, strict=True))
    return results


@pytest.mark.parametrize("run", [run for run in RUNS if run.site], ids=lambda run: run.name)
def test_a_bug_of_a_release_is_found(found: dict[str, Found], run: Run) -> None:
    result = found[run.name]
    assert result.outcome.exit is Exit.FOUND
    assert (result.site, result.cause, result.axis) == (run.site, run.cause, run.axis), result.sentence
    assert run.words in result.sentence


@pytest.mark.parametrize("run", [run for run in RUNS if not run.site], ids=lambda run: run.name)
def test_what_does_not_trigger_it_is_clean(found: dict[str, Found], run: Run) -> None:
    outcome = found[run.name].outcome
    assert outcome.exit is Exit.PASSED, outcome.trouble
    assert outcome.num_passed == outcome.num_tensors > 600
    assert outcome.num_inferred == 0
