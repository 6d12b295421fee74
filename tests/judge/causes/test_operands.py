"""Outputs and gradients that were made from the wrong rows or inputs; and that nothing is claimed on a near miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.verdict import Cause, CauseName

TABLE = draw_tensor(12, 8)
IDS = torch.tensor([3, 11, 7, 0, 5, 9])


def looked_up(folder: Path, wrong: torch.Tensor) -> Cause:
    case = Case(folder)
    case.add("0/-/tok.weight/param", TABLE)
    case.add("0/0/tok/output", TABLE[IDS], change=lambda _: wrong)
    return case.judge().findings[0].cause


def test_other_rows_of_the_table_are_named(tmp_path: Path) -> None:
    found = looked_up(tmp_path, TABLE[IDS.where(IDS < 6, 2)])
    assert found.name == CauseName.WRONG_LOOKUP
    assert found.sentence == "3 of 6 rows are other rows of tok.weight than the reference's: row 2"


def test_rows_of_no_table_are_not_claimed(tmp_path: Path) -> None:
    assert looked_up(tmp_path, TABLE[IDS.where(IDS < 6, 2)] + draw_tensor(6, 8, seed=5)).name != CauseName.WRONG_LOOKUP


def weight_gradient(folder: Path, *, made_from: str) -> Cause:
    """Two microbatches of two layers; the first layer's gradient is made from another input than its own."""
    case = Case(folder)
    inputs = {(i, mb): draw_tensor(2, 3, 4, seed=10 * i + mb) for i in (0, 1) for mb in (0, 1)}
    incoming = {key: draw_tensor(2, 3, 5, seed=99 - 10 * key[0] - key[1]) for key in inputs}
    taken = {
        "own": inputs,
        "other": {key: inputs[1, key[1]] for key in inputs},
        "last": {k: inputs[k[0], 1] for k in inputs},
    }
    taken["foreign"] = {key: draw_tensor(2, 3, 4, seed=77) for key in inputs}
    for (i, mb), x in inputs.items():
        case.add(f"0/{mb}/layers.{i}.fc/input", x)
        case.add(f"0/{mb}/layers.{i}.fc/grad_output", incoming[i, mb])

    def gradient(xs: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        return sum((incoming[0, mb].flatten(0, 1).T @ xs[0, mb].flatten(0, 1) for mb in (0, 1)), torch.zeros(5, 4))

    case.add("0/-/layers.0.fc.weight/param_grad", gradient(inputs), change=lambda _: gradient(taken[made_from]))
    return case.judge().findings[0].cause


def test_a_gradient_made_from_another_layers_input_is_named(tmp_path: Path) -> None:
    found = weight_gradient(tmp_path, made_from="other")
    assert found.name == CauseName.STALE_INPUT
    assert found.sentence.startswith("the gradient is made from the input of layers.1.fc, not from its own")


def test_a_gradient_made_from_one_microbatch_is_named(tmp_path: Path) -> None:
    found = weight_gradient(tmp_path, made_from="last")
    assert found.name == CauseName.STALE_INPUT
    assert "the input of microbatch 1" in found.sentence


def summed(folder: Path, *counts: float) -> Cause:
    case, parts = Case(folder), [draw_tensor(6, 4, seed=seed) for seed in range(3)]
    for mb, part in enumerate(parts):
        case.add(f"0/{mb}/fc.bias/param_grad", part)
    wrong = sum((count * part for count, part in zip(counts, parts, strict=True)), torch.zeros(6, 4))
    case.add("0/-/fc.bias/param_grad", sum(parts, torch.zeros(6, 4)), change=lambda _: wrong)
    return case.judge().findings[0].cause


def test_microbatches_that_do_not_count_once_are_named(tmp_path: Path) -> None:
    found = summed(tmp_path, 2, 1, 0)
    assert found.name == CauseName.MICROBATCHES
    assert found.sentence.endswith("microbatch 0 counts 2 times, microbatch 2 counts 0 times")


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_microbatches_whose_gradients_were_not_recorded_are_named_from_what_a_linear_layer_saw(
    tmp_path: Path, part: str
) -> None:
    case = Case(tmp_path)
    inputs, incoming = ([draw_tensor(2, 3, n, seed=seed + mb) for mb in (0, 1)] for n, seed in ((4, 10), (5, 20)))
    for mb in (0, 1):
        case.add(f"0/{mb}/fc/input", inputs[mb])
        case.add(f"0/{mb}/fc/grad_output", incoming[mb])
    flat = [(g.flatten(0, 1), x.flatten(0, 1)) for g, x in zip(incoming, inputs, strict=True)]
    parts = [g.T @ x if part == "weight" else g.sum(0) for g, x in flat]
    case.add(f"0/-/fc.{part}/param_grad", parts[0] + parts[1], change=lambda _: parts[1])
    found = case.judge().findings[0].cause
    assert found.name == CauseName.MICROBATCHES
    assert found.sentence.endswith("microbatch 0 counts 0 times")


def test_microbatches_that_one_rank_ran_are_named_with_it(tmp_path: Path) -> None:
    case, parts = Case(tmp_path, "dp=2"), [draw_tensor(6, 4, seed=seed) for seed in range(4)]
    for mb, part in enumerate(parts):
        case.add(f"0/{mb}/fc.bias/param_grad", part)
        case.add_trusted(f"0/{mb}/fc/output", part)
        case.candidate.record(mb % 2, f"0/{mb}/fc/output", part, "...")
    case.add("0/-/fc.bias/param_grad", sum(parts, torch.zeros(6, 4)), change=lambda _: parts[0] + parts[2])
    found = case.judge().findings[0].cause
    assert found.sentence.endswith(": microbatches 1 and 3 (those of dp rank 1) count 0 times")


def test_microbatches_that_count_by_halves_are_not_claimed(tmp_path: Path) -> None:
    assert summed(tmp_path, 1.5, 1, 1).name != CauseName.MICROBATCHES


def test_a_gradient_made_from_nothing_known_is_not_claimed(tmp_path: Path) -> None:
    assert weight_gradient(tmp_path, made_from="foreign").name == CauseName.UNEXPLAINED


def before_softmax(folder: Path, made: Callable[[torch.Tensor, int], torch.Tensor], *, off: float = 0.0) -> Cause:
    """A gradient that skipped the backward of what the loss made of the logits."""
    case, logits, arrived = Case(folder), draw_tensor(4, 6).requires_grad_(), draw_tensor(4, 6, seed=1)
    [right] = torch.autograd.grad(made(logits, -1), logits, arrived)
    case.add("0/0/./output", logits.detach())
    case.add("0/0/./grad_output", right, change=lambda _: nudge(arrived, off))
    return case.judge().findings[0].cause


@pytest.mark.parametrize("name", ["log_softmax", "softmax"])
def test_a_softmax_whose_backward_was_left_out_is_named(tmp_path: Path, name: str) -> None:
    found = before_softmax(tmp_path, getattr(torch, name))
    assert found.name == CauseName.BACKWARD_LEFT_OUT
    assert f"of a {name.replace('_', '-')} along" in found.sentence


def test_what_a_softmax_explains_only_nearly_is_not_claimed(tmp_path: Path) -> None:
    assert before_softmax(tmp_path, torch.log_softmax, off=0.05).name == CauseName.UNEXPLAINED
