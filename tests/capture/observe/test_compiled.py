"""Compiled candidates are traced in full or from outside, and the trace says which."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ttrace.capture.observe.compiled import Compiled
from ttrace.capture.plan import Plan
from ttrace.capture.resolve.names import Names
from ttrace.judge.reason import Reason, Why, describe
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.layouts.ids import Kind
from zoo.harness.candidate import Cell, simple
from zoo.harness.cells import attached, reference_of
from zoo.harness.gpt import LENGTH, VOCAB, Gpt
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import SimulatedRank, judge, trace_reference, train
from zoo.harness.transformer import Shape, Transformer

# What torch.compile itself does with autograd functions and with tensors that are no leaves.
pytestmark = [
    pytest.mark.own_defaults,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    torch.manual_seed(0)
    trace_reference(folder, build_small, {})
    return folder


def build_small() -> Gpt:
    return Gpt(num_layers=2)


def compile_whole(model: Gpt) -> nn.Module:
    return cast("nn.Module", torch.compile(model, backend=BACKEND))


def compile_in_place(model: Gpt) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def compile_layers(model: Gpt) -> nn.Module:
    """Compile one layer in each way: wrapped, in place, and by a compiled forward."""
    model.layers[0] = cast("nn.Module", torch.compile(model.layers[0], backend=BACKEND))
    model.layers[1].compile(backend=BACKEND)
    model.norm.forward = torch.compile(model.norm.forward, backend=BACKEND)  # type: ignore[method-assign]  # as users do
    return model


Make = Callable[[Gpt], nn.Module]
WAYS = pytest.mark.parametrize("make", [compile_whole, compile_in_place, compile_layers])


def trace_and_judge(reference: Path, folder: Path, model: nn.Module, compiled: str) -> Judgement:
    settings = {"out": folder / "candidate", "role": "candidate", "reference": reference / "reference"}
    plan = Plan.model_validate({**settings, "compiled": compiled, "stop": False})
    train(plan, model, SimulatedRank(), {})
    return judge(reference, folder / "candidate")


@WAYS
def test_run_eagerly_every_module_is_seen(reference: Path, tmp_path: Path, make: Make) -> None:
    judgement = trace_and_judge(reference, tmp_path, make(build_small()), "eager")
    assert judgement.exit is Exit.PASSED, judgement.problems
    assert judgement.count(Verdict.UNJUDGED) == judgement.count(Verdict.MISSING) == 0
    assert any("torch.compile was off while tracing" in note for note in judgement.notes)


@WAYS
def test_left_compiled_only_the_boundary_is_seen_and_the_rest_is_counted(
    reference: Path, tmp_path: Path, make: Make
) -> None:
    judgement = trace_and_judge(reference, tmp_path, make(build_small()), "boundary")
    assert judgement.exit is Exit.PASSED, (judgement.problems, [c for c in judgement.comparisons if c.spoils][:3])
    unseen = [c for c in judgement.comparisons if c.reason is Reason.COMPILED]
    assert unseen
    assert all(c.verdict is Verdict.UNJUDGED and not c.id.kind.is_of_param for c in unseen)
    why = describe(Why(Reason.COMPILED))
    assert f"{len(unseen)} of {len(judgement.comparisons)} tensors were not judged: {why}" in judgement.notes
    assert any("torch.compile was left on" in note for note in judgement.notes)
    kinds = {c.id.kind for c in judgement.comparisons if c.verdict is Verdict.PASS}
    assert {Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.PARAM_GRAD, Kind.LOSS} <= kinds


def test_around_each_compiled_layer_gradients_are_seen_both_ways(reference: Path, tmp_path: Path) -> None:
    judgement = trace_and_judge(reference, tmp_path, compile_layers(build_small()), "boundary")
    right = {str(c.id) for c in judgement.comparisons if c.verdict is Verdict.PASS}
    for layer in ("layers.0", "layers.1", "norm"):
        assert {f"0/1/{layer}/{kind}" for kind in ("input", "output", "grad_output", "grad_input")} <= right
    assert "0/0/words/output" in right


@pytest.mark.parametrize("compiled", ["eager", "boundary"])
def test_a_fault_inside_compiled_code_is_found(reference: Path, tmp_path: Path, compiled: str) -> None:
    model = build_small()
    norm = model.get_submodule("layers.1.norm2")
    forward = norm.forward
    norm.forward = lambda x: 1.1 * forward(x)
    judgement = trace_and_judge(reference, tmp_path, compile_layers(model), compiled)
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].module == ("layers.1.norm2" if compiled == "eager" else "layers.1")


def test_the_reference_is_always_seen_in_full(tmp_path: Path) -> None:
    trace_reference(tmp_path, lambda: compile_whole(build_small()), {}, compiled="boundary")
    judgement = trace_and_judge(tmp_path, tmp_path, build_small(), "eager")
    assert judgement.exit is Exit.PASSED, judgement.problems


def run_data_parallel(folder: Path) -> dict[str, Judgement | None]:
    """Trace DDP inside and outside of torch.compile, both ways; call this on two ranks."""
    shape, cell = Shape(vocab=48, hidden=16, ffn=24, length=8, num_layers=2), Cell("ddp")
    reference = reference_of(folder, shape, cell, 4, {})
    dist.barrier()
    found = {}
    for inside in (False, True):
        for mode in ("eager", "boundary"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model: nn.Module = Transformer(shape)
            if inside:
                model = DistributedDataParallel(cast("nn.Module", torch.compile(model, backend=BACKEND)))
            else:
                model = cast("nn.Module", torch.compile(DistributedDataParallel(model), backend=BACKEND))
            candidate = simple(model, shape, cell, num_data_ranks=2)
            out = folder / f"{inside}-{mode}"
            settings = {"out": out, "role": "candidate", "reference": reference / "reference", "compiled": mode}
            session = attached(candidate, Plan.model_validate({**settings, "stop": False}))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                candidate.step(session)
            session.close()
            dist.barrier()
            found[out.name] = judge(reference, out) if dist.get_rank() == 0 else None
    return found


@pytest.mark.slow
def test_data_parallel_models_may_be_compiled_inside_or_outside(tmp_path: Path) -> None:
    judgements: dict[str, Judgement] = on_ranks(2, run_data_parallel, tmp_path)[0]
    for name, judgement in judgements.items():
        trouble = [(str(c.id), c.verdict, c.reason) for c in judgement.comparisons if c.spoils or c.verdict.is_wrong]
        assert judgement.exit is Exit.PASSED, (name, judgement.problems, trouble[:5])
        unseen = sum(c.reason is Reason.COMPILED for c in judgement.comparisons)
        assert (unseen > 0) == name.endswith("boundary")


def test_compiled_code_is_left_in_one_piece_and_put_back() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:  # noqa: ARG001
        graphs.append(graph)
        return graph.forward

    model = build_small()
    model.compile(backend=backend)
    call = model._compiled_call_impl
    compiled = Compiled(Names([model]), runs_eagerly=False)
    seen: list[object] = []
    for _, module in compiled.watched:
        module.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randint(VOCAB, (2, LENGTH)))
    assert (len(graphs), len(seen)) == (1, 1)
    assert compiled.opaque == (".",)
    assert {name for name, _ in model.named_modules()} == {name for name, _ in build_small().named_modules()}
    compiled.remove()
    assert model._compiled_call_impl is call
