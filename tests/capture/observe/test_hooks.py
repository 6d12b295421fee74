"""Hooks see every tensor, and change nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from bench._models import CUTS, Model, bed
from bench.calibration import Tally
from ttrace.capture.observe.events import ModuleCall, SessionEvents
from ttrace.capture.observe.hooks import GradientEntry, Hooks, flatten_with_paths, name_slot
from ttrace.capture.resolve.names import Names
from ttrace.judge.check import judge_candidate
from ttrace.layouts.ids import ROOT, Kind, TensorId
from zoo.harness.gpt import LENGTH, VOCAB, Gpt


class Seen(SessionEvents):
    """A watcher that keeps what it is shown."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, int, Kind, str], torch.Tensor] = {}
        self.order: list[tuple[str, Kind]] = []
        self._numbers: dict[str, int] = {}

    def on_call(self, name: str, *, again: bool) -> ModuleCall | None:
        if again:
            return None
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        return ModuleCall(name, 0, 0, number)

    def on_tensor(self, call: ModuleCall, kind: Kind, slot: str, tensor: torch.Tensor) -> torch.Tensor | None:
        self.tensors[call.name, call.number, kind, slot] = tensor.detach().clone()
        self.order.append((call.name, kind))
        return None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        ids, labels = torch.randint(VOCAB, (2, LENGTH)), torch.randint(VOCAB, (2, LENGTH))
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recording_is_bitwise_neutral(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bare = Gpt().to(dtype)
    watched = copy.deepcopy(bare)
    seen = Seen()
    Hooks(Names([watched]).modules(), seen, seen.on_tensor)
    losses = [train(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (bare, watched)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    for (name, a), b in zip(bare.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert len(seen.tensors) > 100


class Counted(TorchFunctionMode):
    """A mode that a script may be in, for instance to check types."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_script_does_not_see_what_is_computed_in_hooks() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2)), Counted()
    x = torch.ones(1, 2)
    with seen:
        model(x)
    alone, seen.functions = seen.functions, []
    watched = Seen()
    hooks = Hooks([(ROOT, model), ("0", model[0])], watched, watched.on_tensor)
    with seen:
        model(x)
    hooks.remove()
    assert watched.tensors
    assert seen.functions == alone


def test_grad_input_is_the_modules_own_share() -> None:
    """A tensor hook on the input would see what the residual connection adds, too."""
    torch.manual_seed(0)
    model = Gpt(num_layers=1)
    seen = Seen()
    expected: dict[str, torch.Tensor] = {}
    Hooks(Names([model]).modules(), seen, seen.on_tensor)
    for name, module in model.named_modules():
        if name not in ("", "words", "places", "layers"):
            module.register_full_backward_hook(
                lambda m, grad_in, grad_out, name=name: expected.__setitem__(name, grad_in[0].clone())  # noqa: ARG005
            )
    logits = model(torch.randint(VOCAB, (2, LENGTH))).flatten(0, 1)
    F.cross_entropy(logits, torch.zeros(2 * LENGTH, dtype=torch.long)).backward()
    assert len(expected) == 11
    for name, gradient in expected.items():
        torch.testing.assert_close(seen.tensors[name, 0, Kind.GRAD_INPUT, ""], gradient, rtol=1e-5, atol=1e-9)


class Shapes(nn.Module):
    """Structured inputs and outputs, keyword arguments, in-place use, a call inside a call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner({"h": x}, scale=torch.tensor(2.0))
        again = self.inner({"h": out["pair"][0]}, scale=torch.tensor(3.0))
        total: torch.Tensor = again["pair"][1].mul_(2.0).sum()
        return total


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, data: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, Any]:
        y = self.fc(data["h"]) * scale
        return {"pair": (y, y + 1.0), "note": "text"}


def test_structured_values_have_slots_and_calls_have_numbers() -> None:
    model, seen = Shapes(), Seen()
    Hooks(Names([model]).modules(), seen, seen.on_tensor)
    model(torch.randn(3, 4, requires_grad=True)).backward()
    keys = set(seen.tensors)
    for number in (0, 1):
        assert {("inner", number, Kind.INPUT, "0.h"), ("inner", number, Kind.INPUT, "scale")} <= keys
        assert {("inner", number, Kind.OUTPUT, "pair.0"), ("inner", number, Kind.OUTPUT, "pair.1")} <= keys
        assert ("inner", number, Kind.GRAD_INPUT, "0.h") in keys
    assert (ROOT, 0, Kind.GRAD_INPUT, "") in keys
    assert torch.equal(seen.tensors["inner", 1, Kind.GRAD_OUTPUT, "pair.1"], torch.full((3, 4), 2.0))


class Twofold(nn.Module):
    """Module with a second output that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x) + x.square(), x.norm()


class Sink(torch.autograd.Function):
    """What DDP puts behind a model: a node through which all outputs pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return gradients


def test_an_unused_output_that_gets_none_is_not_recorded() -> None:
    model, seen = Twofold(), Seen()
    Hooks(Names([model]).modules(), seen, seen.on_tensor)
    x = torch.randn(3, 4, requires_grad=True)
    Sink.apply(*model(x))[0].sum().backward()  # type: ignore[no-untyped-call]
    slots = {slot for name, _, kind, slot in seen.tensors if (name, kind) == (ROOT, Kind.GRAD_OUTPUT)}
    assert slots == {"0"}


@pytest.mark.parametrize("only_inputs", [False, True])
def test_an_unused_output_is_not_waited_for(only_inputs: bool) -> None:
    model, seen = Twofold(), Seen()
    Hooks(Names([model]).modules(), seen, seen.on_tensor)
    x = torch.randn(3, 4, requires_grad=True)
    # Zero-bubble pipelines ask for some gradients only.
    model(x)[0].sum().backward(inputs=[x] if only_inputs else None)
    assert x.grad is not None
    torch.testing.assert_close(seen.tensors[ROOT, 0, Kind.GRAD_INPUT, ""], x.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_a_second_forward(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.fc, x, use_reentrant=reentrant)
            return out

    model, seen = Recomputed(), Seen()
    Hooks(Names([model]).modules(), seen, seen.on_tensor)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert {number for name, number, _, _ in seen.tensors if name == "fc"} == {0}


def test_removed_hooks_are_gone() -> None:
    model, seen = nn.Linear(2, 2), Seen()
    hooks = Hooks(Names([model]).modules(), seen, seen.on_tensor)
    hooks.remove()
    model(torch.randn(1, 2))
    assert not seen.tensors


# What is in a structured value has a name, whoever registered its type.


class Output(OrderedDict[str, Any]):
    """A library's output; it registers how to flatten it, but not what the parts are called."""


class Pair(NamedTuple):
    first: Any
    second: Any


class Box:
    def __init__(self, *contents: Any) -> None:
        self.contents = list(contents)


pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)
pytree.register_pytree_node(Box, lambda box: (box.contents, None), lambda values, _: Box(*values))


def names(value: Any) -> dict[str, Any]:
    return {name_slot(path): leaf for path, leaf in flatten_with_paths(value)}


def test_children_without_names_have_those_of_a_mapping_or_numbers() -> None:
    assert names(Output(loss=1, hidden=(2, 3))) == {"loss": 1, "hidden.0": 2, "hidden.1": 3}
    assert names({"a": Box(1, Output(loss=2))}) == {"a.0": 1, "a.1.loss": 2}


def test_other_structures_are_named_as_torch_names_them() -> None:
    assert names({"x": [1, Pair(2, 3)]}) == {"x.0": 1, "x.1.first": 2, "x.1.second": 3}


def test_leaves_come_in_the_order_in_which_torch_puts_them_back() -> None:
    value = (1, Output(b=2, a=Box(3, 4)), {"z": 5, "y": 6})
    assert [leaf for _, leaf in flatten_with_paths(value)] == pytree.tree_leaves(value)


# Where gradients enter the model: twins are nudged there, so that long sums are rounded otherwise in each.


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
