"""What the adapter reads of Megatron beyond layouts: parameters that optimizers copy, checkpoints, the door."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.attributes import Attributes
from tests.support.megatron_cases import BF16, gpt, moe
from ttrace.attach import PLAN_VARIABLE
from ttrace.capture.plan import Plan
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.runtime import on_megatron

if TYPE_CHECKING:
    from zoo.harness.megatron.models import Training

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def traced(case: Case, folder: Path, seeds: list[int]) -> None:
    """Through the door, as a script goes: once for each seed of generated parameters."""
    import ttrace
    from zoo.harness.megatron.models import Training, parallel

    for seed in seeds:
        with parallel(case), pytest.MonkeyPatch.context() as environment:
            training = Training(case)
            plan = folder / f"plan-{seed}.json"
            Plan(out=folder / str(seed), seed=seed, stop=False).save(plan)
            environment.setenv(PLAN_VARIABLE, str(plan))
            session = ttrace.attach(training.chunks, training.optimizer)
            with session.step():
                training.step()
            session.close()


@pytest.mark.parametrize("case", [gpt(), gpt(dtype=BF16), gpt(zero=True, dtype=BF16)], ids=lambda case: case.name)
def test_the_updated_parameter_depends_on_the_generated_one(case: Case, tmp_path: Path) -> None:
    on_megatron(1, traced, case, tmp_path, [1, 2])
    kept = {}
    for seed in (1, 2):
        found = Trace(tmp_path / str(seed)).shards
        before, after = (
            next(s.tensor() for t, [s] in found.items() if t.name == WEIGHT and t.kind is kind)
            for kind in (Kind.PARAM, Kind.PARAM_AFTER)
        )
        # One step of Adam is about lr, 0.01: with another main copy the parameter would be somewhere else altogether.
        assert (after.float() - before.float()).abs().max() < 0.02
        assert not torch.equal(before, after)
        kept[seed] = before
    assert not torch.equal(kept[1], kept[2])


def left_behind(case: Case, folder: Path) -> dict[str, list[str]]:
    """On every rank: what is another one while a session is open, and after it."""
    import ttrace
    from zoo.harness.megatron.models import Training, parallel

    with parallel(case), pytest.MonkeyPatch.context() as environment:
        training = Training(case)
        Plan(out=folder / "trace", stop=False).save(folder / "plan.json")
        environment.setenv(PLAN_VARIABLE, str(folder / "plan.json"))
        training.step()  # what Megatron and torch load on use is loaded
        modules = [module for chunk in training.chunks for module in chunk.modules()]
        before = Attributes(["megatron", "torch"], [*modules, training.optimizer])
        session = ttrace.attach(training.chunks, training.optimizer)
        with session.step():
            during = list(before.changes())
            training.step()
        session.close()
        return {"during": during, "after": [change for change in before.changes() if not _is_megatrons(change)]}


def _is_megatrons(change: str) -> bool:
    """What Megatron's own modules keep from step to step."""
    return not any(word in change for word in ("step", "finish_grad_sync", "apply", "forward", "hook", "dropout"))


def disagreements(case: Case) -> dict[str, list[str]]:
    """On every rank: what the adapter says of a right model, and of one whose checkpoint is wrong."""
    from ttrace.adapters.megatron.adapter import Megatron
    from zoo.harness.megatron.models import Training, parallel

    with parallel(case):
        training = Training(case)
        right = _said(Megatron(training.chunks, training.optimizer))
        _spoil(training)
        return {"right": right, "wrong": _said(Megatron(training.chunks, training.optimizer))}


def _said(adapter: Any) -> list[str]:
    from ttrace.capture.resolve.layout_resolver import LayoutResolver
    from ttrace.capture.resolve.names import Names
    from ttrace.capture.resolve.reference_trace import ReferenceTrace
    from ttrace.layouts.ids import TensorId
    from ttrace.layouts.rules import Rules

    resolver = LayoutResolver(adapter, Rules(), ReferenceTrace(None), 1)
    parameters, _ = Names(adapter.chunks, adapter.name).parameters()
    found = {}
    for name, parameter in parameters.items():
        placement = resolver.resolve(TensorId.of(0, None, name, Kind.PARAM), parameter)
        assert placement is not None
        found[name] = placement
    return list(adapter.find_disagreements(found))


def _spoil(training: Training) -> None:
    """The checkpoint of one weight says that the other rank's rows are here."""
    layer = training.chunks[0].module.decoder.layers[1].mlp.linear_fc2
    own = layer.sharded_state_dict

    def wrong(*args: Any, **kwargs: Any) -> Any:
        saved = own(*args, **kwargs)
        for key, shard in saved.items():
            if key.endswith("weight"):
                rows, columns = shard.global_offset
                shard.global_offset = (rows, shard.local_shape[1] - columns)
        return saved

    layer.sharded_state_dict = wrong


def test_a_checkpoint_that_lays_a_parameter_out_otherwise_is_told() -> None:
    for said in on_megatron(2, disagreements, gpt(tp=2, sp=True, swiglu=True)):
        assert said["right"] == []
        [problem] = said["wrong"]
        assert problem.startswith(
            "decoder.layers.1.mlp.linear_fc2.weight: according to sharded_state_dict this rank holds"
        )


def test_a_session_leaves_nothing_behind(tmp_path: Path) -> None:
    [found] = on_megatron(1, left_behind, moe(), tmp_path)
    for name in ("schedules.forward_step", "schedules.backward_step", "MoEAuxLossAutoScaler.apply", "finish_grad_sync"):
        assert any(name in change for change in found["during"]), name
    assert found["after"] == []
