"""The CPU runtime changes nothing that Megatron computes, and replaces nothing that Megatron does not use."""

from __future__ import annotations

import functools
import math
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from zoo.harness.megatron.case import Case
from zoo.harness.megatron.data import Batch, microbatch
from zoo.harness.megatron.install import ABSENT, REPLACED, UNBOUND, Absent, Replaced, Unbound
from zoo.harness.megatron.runtime import on_megatron
from zoo.harness.megatron.wheels import NEWEST, wheel

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Tensors = dict[str, torch.Tensor]
PLAIN = Case(layers=2, clip=0.0, masked=True)
ROUNDING = 2e-6
"""Of float32, as relative L2 of a gradient: observed are 4e-7 at most."""


def test_gradients_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    on_megatron(1, save_plain, PLAIN, tmp_path / "megatron")
    saved = torch.load(tmp_path / "megatron")
    parameters = {name: value.double().requires_grad_() for name, value in saved["parameters"].items()}
    num_microbatches = PLAIN.samples // PLAIN.micro
    total = torch.zeros((), dtype=torch.double)
    for start in range(0, PLAIN.samples, PLAIN.micro):
        batch = microbatch(PLAIN, 0, range(start, start + PLAIN.micro))
        total = total + gpt_loss(parameters, batch) / num_microbatches
    total.backward()
    assert saved["loss"] == pytest.approx(total.item(), rel=1e-6)
    grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    assert worst_difference(saved["grads"], grads) < ROUNDING


LAYOUTS = [
    Case(),
    Case(tp=2),
    Case(tp=2, sp=True, groups=2, swiglu=True, rope=True, rmsnorm=True, tied=False, bias=False),
    Case(pp=2, deallocate=True),
    Case(pp=2, vpp=2),
    Case(cp=2, masked=True, per_token=True),
    Case(zero=True, overlap_grads=True, overlap_params=True),
    Case(ep=2, experts=4, shared_expert=True),
    Case(tp=2, sp=True, experts=4, dispatcher="allgather"),
    Case(tp=2, recompute="full"),
]
CASES = [replace(case, clip=0.0) for case in LAYOUTS]  # clipping would hide a factor


def test_every_layout_gives_the_gradients_of_one_process(tmp_path: Path) -> None:
    on_megatron(1, save_grads, list({case.reference: None for case in CASES}), tmp_path)
    [differences, _] = on_megatron(2, grad_differences, CASES, tmp_path)
    assert {name: worst for name, worst in differences.items() if worst > ROUNDING} == {}
    assert len(differences) == len(CASES)


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.name)
def test_a_replaced_name_is_used(replaced: Replaced) -> None:
    assert pkgutil.resolve_name(replaced.name) is not replaced.by
    assert replaced.why
    assert replaced.spelling in source(replaced.until or NEWEST)


@pytest.mark.parametrize("absent", ABSENT, ids=lambda absent: absent.module)
def test_a_supplied_module_is_imported(absent: Absent) -> None:
    assert absent.why
    assert all(name in source(absent.until or NEWEST) for name in (absent.module, *absent.contents()))


@pytest.mark.parametrize("unbound", UNBOUND, ids=lambda unbound: unbound.name)
def test_an_unbound_name_is_used(unbound: Unbound) -> None:
    path = wheel(unbound.until or NEWEST).joinpath(*unbound.module.split(".")).with_suffix(".py")
    assert unbound.name in path.read_text()


@functools.cache
def source(version: str) -> str:
    """All of a wheel."""
    return "\n".join(path.read_text() for path in wheel(version).rglob("*.py"))


def worst_difference(ours: Tensors, theirs: Tensors) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def gpt_loss(parameters: Tensors, batch: Batch) -> torch.Tensor:
    """GPT-2 in plain functions."""
    words = parameters["embedding.word_embeddings.weight"]
    x = words[batch["tokens"]] + parameters["embedding.position_embeddings.weight"][batch["position_ids"]]
    for layer in range(PLAIN.layers):
        mine = Part(parameters, f"decoder.layers.{layer}.")
        x = x + attention(mine.of("self_attention."), mine.norm("input_layernorm", x), batch["attention_mask"])
        hidden = F.gelu(mine.linear("mlp.linear_fc1", mine.norm("pre_mlp_layernorm", x)))
        x = x + mine.linear("mlp.linear_fc2", hidden)
    logits = Part(parameters, "decoder.").norm("final_layernorm", x) @ words.T
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def attention(mine: Part, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    heads = mine.linear("linear_qkv", x).unflatten(-1, (PLAIN.heads, 3, -1))  # query, key and value of each head
    q, k, v = heads.transpose(1, 2).unbind(3)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf)
    return mine.linear("linear_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Part:
    """Parameters whose names begin alike."""

    def __init__(self, parameters: Tensors, prefix: str) -> None:
        self._parameters, self._prefix = parameters, prefix

    def of(self, part: str) -> Part:
        return Part(self._parameters, self._prefix + part)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._of(name, "weight").T + self._of(name, "bias")

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return scaled * self._of(name, "weight") + self._of(name, "bias")

    def _of(self, name: str, kind: str) -> torch.Tensor:
        return self._parameters[f"{self._prefix}{name}.{kind}"]


def save_plain(case: Case, path: Path) -> None:
    """On one rank: parameters before a step, gradients and loss of it."""
    from zoo.harness.megatron.models import Training, parallel
    from zoo.harness.megatron.shards import filled

    with parallel(case):
        training = Training(case)
        filled(training.chunks)
        model = dict(training.chunks[0].module.named_parameters())
        parameters = {name: parameter.detach().clone() for name, parameter in model.items()}
        loss = training.step().loss
        grads = {name: parameter.main_grad for name, parameter in model.items()}
        torch.save({"parameters": parameters, "grads": grads, "loss": loss}, path)


def save_grads(cases: list[Case], folder: Path) -> None:
    for case in cases:
        torch.save(trained(case), folder / case.name)


def grad_differences(cases: list[Case], folder: Path) -> dict[str, float]:
    """Of each case, the worst difference from its reference."""
    references = {case: torch.load(folder / case.reference.name) for case in cases}
    return {case.name: worst_difference(trained(case), references[case]) for case in cases}


def trained(case: Case) -> Tensors:
    """On every rank: all gradients of a step."""
    from zoo.harness.megatron.models import Training, parallel
    from zoo.harness.megatron.shards import filled, whole_grads

    with parallel(case):
        training = Training(case)
        filled(training.chunks)
        training.step()
        return whole_grads(training.chunks)
