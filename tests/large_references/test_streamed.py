"""A streamed model is the ordinary one, bit for bit, with no parameter in memory; what it cannot do it says."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ttrace
from tests.support.streamed_runs import (
    BATCH,
    BF16,
    FP32,
    LENGTH,
    VOCAB,
    assert_same_bits,
    hugging,
    own_loss,
    trace_both,
    traced,
)
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError
from ttrace.judge.check import check
from ttrace.judge.findings.isolated import combine
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.tensors.logical import LogicalTensor
from ttrace.judge.verdict import Exit, Verdict
from ttrace.large_references.parameter_source import ParameterSource, find_source
from ttrace.layouts.ids import Kind, TensorId
from ttrace.trace.reader import Trace
from ttrace.values.generate import Normal


def small(**settings: Any) -> nn.Module:
    return hugging("llama", FP32, **{"tied": False, **settings})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_streamed_is_the_ordinary_reference_bit_for_bit(
    family: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    build = partial(hugging, family, dtype, tied=tied)
    streamed, ordinary = trace_both(tmp_path, ttrace.streamed(build), build())
    assert_same_bits(streamed, ordinary)
    assert {Kind.LOSS, Kind.PARAM_GRAD, Kind.GRAD_INPUT} <= {t.kind for t in streamed.shards}


@pytest.mark.parametrize(("keep_bytes", "share"), [(1 << 12, 1.0), (1 << 30, 0.8)], ids=["some", "all"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_values_that_are_kept_for_backward_change_nothing(
    keep_bytes: int, share: float, tied: bool, tmp_path: Path
) -> None:
    build = partial(hugging, "llama", FP32, tied=tied)
    model = ttrace.streamed(build, keep_bytes=keep_bytes)
    with mock.patch.object(
        ParameterSource, "generate_run", autospec=True, side_effect=ParameterSource.generate_run
    ) as kept:
        assert_same_bits(*trace_both(tmp_path, model, build()))
    streamed = ttrace.streamed(build)
    with mock.patch.object(
        ParameterSource, "generate_run", autospec=True, side_effect=ParameterSource.generate_run
    ) as anew:
        traced(Plan(out=tmp_path / "anew", stop=False), streamed)
    assert kept.call_count < share * anew.call_count


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_blocks_are_the_ordinary_reference_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    build = partial(hugging, family, BF16, tied=tied)
    assert_same_bits(*trace_both(tmp_path, ttrace.streamed(build, by="blocks"), build()))


@pytest.mark.parametrize("by", ["operators", "blocks"])
def test_autocast_is_the_ordinary_reference_bit_for_bit(by: Any, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model, batch)

    build = partial(hugging, "qwen3_moe", FP32, tied=True)
    streamed, ordinary = trace_both(tmp_path, ttrace.streamed(build, by=by), build(), loss)
    assert_same_bits(streamed, ordinary)
    assert any(shards[0].record.dtype == BF16 for shards in streamed.shards.values())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_gradients_of_microbatches_wait_for_the_last(family: str, tmp_path: Path) -> None:
    build = partial(hugging, family, BF16, tied=False)
    model = ttrace.streamed(build, num_microbatches=3)
    assert_same_bits(*trace_both(tmp_path, model, build(), num_microbatches=3))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_checkpointed_layers_are_the_ordinary_reference_bit_for_bit(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = small()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model

    assert_same_bits(*trace_both(tmp_path, ttrace.streamed(build), build()))


def test_other_values_in_backward_would_be_seen(tmp_path: Path) -> None:
    """What the tests above rest on: backward reads values that are made anew."""
    model = ttrace.streamed(small)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = own_loss(model, batch)
        source = find_source(model.get_parameter("model.layers.0.mlp.down_proj.weight"))
        if source is not None:
            source.seed = 1
        return found

    with pytest.raises(AssertionError, match="mlp"):
        assert_same_bits(*trace_both(tmp_path, model, small(), loss))


def test_nothing_is_kept(tmp_path: Path) -> None:
    """After a step there is neither a value nor a gradient; in the trace parameters have no bytes."""
    model = ttrace.streamed(partial(hugging, "qwen3_moe", FP32, tied=False))
    trace = traced(Plan(out=tmp_path, stop=False), model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(
        parameter.untyped_storage().nbytes() == 0 or parameter.data_ptr() == 0 for parameter in model.parameters()
    )
    records = [shards[0].record for tensor_id, shards in trace.shards.items() if tensor_id.kind is Kind.PARAM]
    assert records
    assert all(record.is_generated and record.begin == record.end for record in records)
    embedded = trace.shards[TensorId.of(0, None, "model.embed_tokens.weight", Kind.PARAM_GRAD)]
    assert sum(s.record.end - s.record.begin for s in embedded) <= BATCH * LENGTH * 32 * 4  # rows that occurred


def test_a_candidate_is_judged_against_a_streamed_reference(tmp_path: Path) -> None:
    """One that has an optimizer: its updates are not judged, and that is said."""
    folders = [tmp_path / str(number) for number in range(4)]
    plan = Plan(out=folders[0], stop=False)
    traced(plan, ttrace.streamed(small))
    for twin in (1, 2, 3):
        update = {"out": folders[twin], "role": "twin", "twin": twin, "reference": folders[0]}
        traced(plan.model_copy(update=update), ttrace.streamed(small))
    model = small()
    plan = Plan(out=tmp_path / "candidate", role="candidate", reference=folders[0], stop=False)
    candidate = traced(plan, model, optimizer=torch.optim.AdamW(model.parameters()))
    judgement = check(Trace(folders[0]), [Trace(folder) for folder in folders[1:]], candidate)
    assert judgement.exit is Exit.PASSED
    unjudged = {c.id.kind for c in judgement.comparisons if c.verdict is Verdict.UNJUDGED}
    assert unjudged == {Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM}
    assert any(describe(Why(Reason.UNTRACED_IN_REFERENCE)) in note for note in judgement.notes)
    assert any("updates and the norm of all gradients are not traced" in note for note in judgement.notes)


def test_an_isolated_run_is_streamed_too(tmp_path: Path) -> None:
    build = partial(hugging, "qwen3_moe", FP32, tied=False)
    traced(Plan(out=tmp_path / "first", stop=False), ttrace.streamed(build))
    plan = Plan(out=tmp_path / "streamed", isolated=True, reference=tmp_path / "first", stop=False)
    streamed = traced(plan, ttrace.streamed(build))
    update = {"out": tmp_path / "ordinary", "role": "candidate", "reference": tmp_path / "streamed"}
    assert_same_bits(streamed, traced(plan.model_copy(update=update), build()))


def test_isolation_runs_what_is_accused_and_one_block_of_each_kind(tmp_path: Path) -> None:
    build = partial(hugging, "llama", FP32, tied=False, num_hidden_layers=5)
    traced(Plan(out=tmp_path / "first", stop=False), ttrace.streamed(build))
    plan = Plan(
        out=tmp_path / "few", isolated=True, reference=tmp_path / "first", inside=("model.layers.3.mlp",), stop=False
    )
    model = ttrace.streamed(build)
    few = traced(plan, model)
    assert not any("forward" in vars(module) for module in model.modules())  # all is as it was
    assert few.manifest.passed == ("model.layers.1", "model.layers.2")
    ran = {t.name.split(".")[2] for t in few.shards if t.name.startswith("model.layers.") and t.kind is not Kind.PARAM}
    assert ran == {"0", "3", "4"}
    everything = traced(plan.model_copy(update={"out": tmp_path / "all", "inside": ()}), model)
    assert everything.manifest.passed == ()
    assert len(everything.shards) > len(few.shards)
    for tensor_id, shards in few.shards.items():
        if not tensor_id.kind.is_of_call and not few.is_passed(tensor_id):
            assert torch.equal(shards[0].tensor(), everything.shards[tensor_id][0].tensor()), tensor_id


def test_what_was_passed_by_is_not_judged_and_that_is_said(tmp_path: Path) -> None:
    build = partial(hugging, "llama", FP32, tied=False, num_hidden_layers=4)
    traced(Plan(out=tmp_path / "first", stop=False), ttrace.streamed(build))
    plan = Plan(
        out=tmp_path / "reference", isolated=True, reference=tmp_path / "first", inside=("model.layers.2",), stop=False
    )
    reference = traced(plan, ttrace.streamed(build))
    update: dict[str, Any] = {"out": tmp_path / "twin", "role": "twin", "twin": 1, "reference": tmp_path / "reference"}
    twin = traced(plan.model_copy(update=update), ttrace.streamed(build))
    update |= {"out": tmp_path / "candidate", "role": "candidate", "twin": 0}
    candidate = traced(plan.model_copy(update=update), build())
    judgement = check(reference, [twin], candidate)
    assert judgement.exit is Exit.PASSED
    passed = [c.id for c in judgement.comparisons if c.reason is Reason.SKIPPED_BLOCK]
    beside = {(t.name, t.kind) for t in passed if not t.name.startswith("model.layers.1")}
    assert beside == {("model.layers.0", Kind.GRAD_OUTPUT), ("model.layers.2", Kind.INPUT)}
    assert Kind.PARAM_GRAD in {t.kind for t in passed}
    assert any(describe(Why(Reason.SKIPPED_BLOCK)) in note for note in combine(judgement, judgement).notes)


def test_an_optimizer_is_harmless_and_norms_are_not_traced(tmp_path: Path) -> None:
    model = ttrace.streamed(small)
    optimizer = torch.optim.AdamW(model.parameters())
    session = TracingSession(SessionParts(Plan(out=tmp_path, stop=False), model, optimizer, Native([model])))
    with session.step():
        own_loss(model, {name: torch.randint(VOCAB, (1, 4)) for name in ("input_ids", "labels")}).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    kinds = {tensor_id.kind for tensor_id in Trace(tmp_path).shards}
    assert Kind.PARAM_GRAD in kinds
    assert not kinds & {Kind.GRAD_NORM, Kind.CLIP, Kind.PARAM_AFTER, Kind.UPDATE, Kind.OPTIM}


def test_a_large_weight_is_used_in_slices(tmp_path: Path) -> None:
    """Forward and the weight's gradient are as good as whole; the input's gradient is summed in another order."""
    streamed, ordinary = trace_both(tmp_path, ttrace.streamed(small, max_bytes=1000), small())
    head = TensorId.of(0, None, "lm_head.weight", Kind.PARAM_GRAD)
    assert len(streamed.shards[head]) == 7  # of 7 rows with 128 bytes each
    for tensor_id in ordinary.shards:
        x, y = LogicalTensor.of(streamed, tensor_id), LogicalTensor.of(ordinary, tensor_id)
        assert x is not None
        assert y is not None
        torch.testing.assert_close(x.tensor(), y.tensor(), atol=1e-6, rtol=1e-4)


class Raw(torch.autograd.Function):
    """x * weight by a kernel that knows addresses only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x * read(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return gradients[0] * read(ctx.weight), (gradients[0] * x).flatten(0, -2).sum(0)


def read(weight: torch.Tensor) -> torch.Tensor:
    assert weight.data_ptr()
    memory = (ctypes.c_char * (weight.numel() * 4)).from_address(weight.data_ptr())
    return torch.frombuffer(bytearray(memory), dtype=torch.float32)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Raw.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def gains() -> nn.Module:
    stack = nn.ModuleList([nn.Sequential(Gain(), nn.Linear(8, 8)), nn.Sequential(Gain(), nn.Linear(8, VOCAB))])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.blocks = nn.Embedding(VOCAB, 8), stack

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return x

    return Model()


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def test_kernels_that_are_handed_addresses_run_by_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ordinary = gains()
    model = ttrace.streamed(gains, by="blocks")
    assert_same_bits(*trace_both(tmp_path, model, ordinary, token_loss))
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())  # too late would be loud


def test_frozen_parameters_are_streamed_too(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = gains()
        model.blocks[0].requires_grad_(False)  # type: ignore[index]
        return model

    assert_same_bits(*trace_both(tmp_path, ttrace.streamed(build, by="blocks"), build(), token_loss))


def test_without_a_session_it_is_a_model_like_others() -> None:
    model = ttrace.streamed(small)
    own_loss(model, {name: torch.randint(VOCAB, (1, 4)) for name in ("input_ids", "labels")}).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gradient_that_grows_after_it_was_recorded_is_a_problem(tmp_path: Path) -> None:
    trace = traced(Plan(out=tmp_path, stop=False), ttrace.streamed(small), num_microbatches=2)
    assert any("its gradient grew after 1 backward passes" in problem for problem in trace.problems())


def test_reentrant_checkpoints_that_share_a_weight_are_a_problem(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x: torch.Tensor = model[0](batch["input_ids"])  # type: ignore[index]
        for _ in range(2):
            x = checkpoint(model[1], x, use_reentrant=True)  # type: ignore[index]
        return x.square().mean()

    model = ttrace.streamed(lambda: nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8)))
    trace = traced(Plan(out=tmp_path, stop=False), model, loss)
    assert any("use_reentrant=False" in problem for problem in trace.problems())


def test_spreads_follow_the_rule_unless_stated() -> None:
    model = ttrace.streamed(small, spreads={"*.layers.*.weight": (0.0, 0.5), "*.1.mlp.up_proj.weight": (1.0, 0.25)})
    found = {
        name: source.distribution for name, p in model.named_parameters() if (source := find_source(p)) is not None
    }
    assert found["model.norm.weight"] == Normal(1.0, 0.02)
    assert found["lm_head.weight"] == Normal(0.0, 0.02)
    assert found["model.layers.0.mlp.up_proj.weight"] == Normal(0.0, 0.5)
    assert found["model.layers.1.mlp.up_proj.weight"] == Normal(1.0, 0.25)
    wide = ttrace.streamed(lambda: nn.Linear(40000, 4))
    bias, weight = (find_source(parameter) for parameter in (wide.bias, wide.weight))  # type: ignore[arg-type]
    assert bias is not None
    assert bias.distribution == Normal(0.0, 0.02)
    assert weight is not None
    assert weight.distribution == Normal(0.0, 0.005)


def test_misuse_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no parameter of this model is on the meta device"):
        ttrace.streamed(nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
    with pytest.raises(CaptureError, match=r"buffer running_mean is on the meta device.*lambda: Model"):
        ttrace.streamed(model)
    with pytest.raises(CaptureError, match=r"spreads has 'head\.\*'"):
        ttrace.streamed(lambda: nn.Linear(2, 2), spreads={"head.*": (0.0, 1.0)})
    with pytest.raises(CaptureError, match="writes to a streamed parameter"):
        nn.init.zeros_(ttrace.streamed(lambda: nn.Linear(2, 2)).weight)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="streamed and has no values of its own"):
        traced(Plan(out=tmp_path, stop=False, parameters="own"), ttrace.streamed(small))


def test_a_parameter_that_two_modules_get_while_building_stays_one() -> None:
    def build() -> nn.Module:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        shared = nn.Parameter(torch.ones(4, 4))
        shared.mark = "kept"  # type: ignore[attr-defined]
        first.weight = second.weight = shared
        return nn.Sequential(first, second)

    model = ttrace.streamed(build)
    assert model[0].weight is model[1].weight  # type: ignore[index]
    assert model[0].weight.mark == "kept"  # type: ignore[index]
