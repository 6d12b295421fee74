"""Where gradients enter the model: twins are nudged there, so that long sums are rounded otherwise in each."""

from __future__ import annotations

import torch

from bench._models import CUTS, Model, bed
from bench.calibration import Tally
from ttrace.capture.observe.events import ModuleCall
from ttrace.capture.observe.gradient_entry import GradientEntry
from ttrace.judge.check import judge_candidate
from ttrace.layouts.ids import Kind, TensorId

LOSS, LOSSES, LOGITS, HIDDEN = torch.zeros(()), torch.zeros(2, 16), torch.zeros(2, 16, 64), torch.zeros(2, 16, 8)


def call(name: str, microbatch: int = 0) -> ModuleCall:
    return ModuleCall(name, 0, microbatch, 0)


def test_gradients_enter_at_the_logits_once() -> None:
    entry, head, model, block = GradientEntry(), call("head"), call("."), call("layers.1")
    assert entry.is_at(head, Kind.GRAD_OUTPUT, LOGITS)
    assert not entry.is_at(model, Kind.GRAD_OUTPUT, LOGITS)  # the same tensor
    assert not entry.is_at(head, Kind.GRAD_INPUT, HIDDEN)
    assert not entry.is_at(block, Kind.GRAD_OUTPUT, HIDDEN)


def test_what_a_model_makes_of_its_logits_itself_comes_first() -> None:
    entry, model, loss, head = GradientEntry(), call("."), call("loss"), call("head")
    assert not entry.is_at(model, Kind.GRAD_OUTPUT, LOSS)
    assert not entry.is_at(loss, Kind.GRAD_OUTPUT, LOSS)
    assert not entry.is_at(loss, Kind.GRAD_INPUT, LOGITS)  # nothing has entered yet
    assert entry.is_at(head, Kind.GRAD_OUTPUT, LOGITS)


def test_losses_of_tokens_and_logits_are_both_entries() -> None:
    entry, model, head = GradientEntry(), call("."), call("head")
    assert entry.is_at(model, Kind.GRAD_OUTPUT, LOSSES)
    assert entry.is_at(head, Kind.GRAD_OUTPUT, LOGITS)


def test_every_microbatch_has_its_own() -> None:
    entry = GradientEntry()
    for microbatch in range(2):
        head = call("head", microbatch)
        assert entry.is_at(head, Kind.GRAD_OUTPUT, LOGITS)
        entry.is_at(head, Kind.GRAD_INPUT, HIDDEN)
    assert not entry.is_at(call("layers.1", 0), Kind.GRAD_OUTPUT, HIDDEN)


def test_sixteen_bits_enter_unchanged_and_so_does_what_follows() -> None:
    entry, head = GradientEntry(), call("head")
    assert not entry.is_at(head, Kind.GRAD_OUTPUT, LOGITS.bfloat16())
    entry.is_at(head, Kind.GRAD_INPUT, HIDDEN.bfloat16())
    assert not entry.is_at(call("router"), Kind.GRAD_OUTPUT, HIDDEN)


def test_what_has_no_strides_is_left_alone() -> None:
    assert not GradientEntry().is_at(call("head"), Kind.GRAD_OUTPUT, LOGITS.to_sparse())


def test_recomputed_activations_are_no_gradients() -> None:
    assert not GradientEntry().is_at(call("head"), Kind.RECOMPUTE_INPUT, LOGITS)


def test_a_long_sum_in_parts_is_no_finding() -> None:
    """Over 16,384 words, two halves are rounded otherwise than the whole, by more than twins once differed there."""
    with bed(Model("llama", "fp32", 1, is_wide=True)) as found:
        judgement = judge_candidate(found.twins, found.candidate(CUTS["tp=2"]))
        noise = found.twins.tolerances[TensorId.parse("0/0/output/grad_input")].twin_error
    tally = Tally.of(judgement)
    assert tally.accused == []
    assert max(tally.ratios) < 3.0
    assert noise > torch.finfo(torch.float32).eps  # the nudge's own size, and more
