"""An adapter is the one that recognises the model, or the one that a script chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch import nn

import ttrace
from ttrace.adapters import registry
from ttrace.adapters.adapter import Adapter
from ttrace.adapters.native.adapter import Native
from ttrace.adapters.registry import GROUP, find_adapter, make_adapter
from ttrace.attach import PLAN_VARIABLE
from ttrace.capture.plan import Plan
from ttrace.errors import CaptureError
from ttrace.layouts.mesh import Mesh


class Toy(nn.Linear):
    """A framework's own module."""


class ForToys(Adapter):
    @classmethod
    def recognizes(cls, chunks: Sequence[nn.Module]) -> bool:
        return any(isinstance(chunk, Toy) for chunk in chunks)


class AlsoForToys(ForToys):
    pass


class NoAdapter:
    pass


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    def entries(*names: str) -> None:
        found = [EntryPoint(name.lower(), f"{__name__}:{name}", GROUP) for name in names]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == GROUP else [])

    return entries


def test_a_registered_adapter_gets_the_models_that_it_recognises(register: Register) -> None:
    register("ForToys")
    assert find_adapter([Toy(2, 2)]).__name__ == "ForToys"
    assert find_adapter([nn.Linear(2, 2)]) is Native


def test_every_model_has_an_adapter(register: Register) -> None:
    register()
    assert find_adapter([Toy(2, 2)]) is Native


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["ForToys", "AlsoForToys"], r"several adapters recognise this model: .*AlsoForToys, .*ForToys. Choose one"),
        (["NoAdapter"], "noadapter .* is not a subclass of ttrace.adapters.adapter.Adapter"),
        (["NotThere"], "notthere .* cannot be loaded: AttributeError"),
    ],
)
def test_what_is_registered_wrongly_is_refused(register: Register, names: list[str], words: str) -> None:
    register(*names)
    with pytest.raises(CaptureError, match=words):
        find_adapter([Toy(2, 2)])


def test_a_script_may_choose_a_class_or_an_instance() -> None:
    chunks = [nn.Linear(2, 2)]
    made = make_adapter(ForToys, chunks, None, None)
    assert type(made) is ForToys
    assert make_adapter(made, chunks, None, None) is made
    with pytest.raises(CaptureError, match="Leave mesh= out"):
        make_adapter(made, chunks, None, Mesh())
    with pytest.raises(CaptureError, match="give a subclass"):
        make_adapter(NoAdapter, chunks, None, None)  # type: ignore[arg-type]


def test_attach_takes_the_chosen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Renaming(Adapter):
        def name(self, chunk: nn.Module, path: str) -> str:
            return super().name(chunk, path).replace("0", "first")

    Plan(out=tmp_path / "trace", stop=False).save(tmp_path / "plan.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    ttrace.attach(nn.Sequential(nn.Linear(2, 2)), adapter=Renaming).close()
    assert '"first"' in (tmp_path / "trace" / "rank-00000" / "manifest.json").read_text()


# What no adapter can read is refused by name, and never judged.


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # without a process group
    nn.Module.__init__(model)
    with pytest.raises(CaptureError, match=r"FSDP1 .* Use FSDP2 \(fully_shard\), which TTrace knows"):
        make_adapter(None, [nn.Sequential(model)], None, None)


def test_deepspeed_without_its_engine_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.ds_id = 0  # type: ignore[attr-defined]  # as ZeRO-3 marks them
    with pytest.raises(CaptureError, match=r"ZeRO-3 without its engine \(weight has a ds_id"):
        make_adapter(None, [model], None, None)

    zero = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    with pytest.raises(CaptureError, match=r"Give ttrace\.attach the engine"):
        make_adapter(None, [nn.Linear(4, 4)], [zero], None)
