"""The training step of a script that does not mention TTrace is found, whatever its loop looks like."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ttrace
from tests.support.attributes import Attributes
from tests.support.loops import trace_loop, watch_loop
from ttrace.attach import PLAN_VARIABLE, on_attach
from ttrace.automatic.variables import HOOK, MARK_VARIABLE, make_variables
from ttrace.automatic.watch import Watch
from ttrace.capture.plan import Plan
from ttrace.compat.distributed import make_hash_store
from ttrace.errors import CaptureError
from ttrace.layouts.ids import Kind
from ttrace.trace.reader import Trace
from zoo.harness.limits import HANG

NUM_STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def make_loader(batch_size: int = 4) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), batch_size)


def train(
    model: nn.Module, loader: DataLoader[Any], num_microbatches: int = 1, *, optimizer: Any = torch.optim.AdamW
) -> None:
    update, batches = optimizer(model.parameters(), lr=1e-2), iter(loader)
    for _ in range(NUM_STEPS):
        for _ in range(num_microbatches):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / num_microbatches).backward()
        update.step()
        update.zero_grad()


def microbatches(trace: Trace, kind: Kind = Kind.BATCH) -> list[int]:
    return sorted({t.microbatch for t in trace.shards if t.kind is kind and t.microbatch is not None})


def values(trace: Trace, text: str) -> torch.Tensor:
    [tensor_id] = [t for t in trace.shards if str(t) == text]
    return trace.shards[tensor_id][0].read_stored()


def test_a_loop_with_a_loader(tmp_path: Path) -> None:
    trace = trace_loop(tmp_path, lambda: train(make_model(), make_loader(), 3))
    found = trace.manifest.attachment
    assert found is not None
    assert (found.model, found.optimizers, found.num_microbatches) == ("Sequential", ("AdamW",), 3)
    assert found.data == "batches of DataLoader"
    assert found.labels
    assert microbatches(trace) == microbatches(trace, Kind.OUTPUT) == [0, 1, 2]
    assert values(trace, "0/0/./batch.0").equal(values(trace, "0/0/./input"))
    assert not values(trace, "0/0/./batch.0").equal(values(trace, "0/1/./batch.0"))
    names = {t.name for t in trace.shards if t.kind is Kind.PARAM_AFTER}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_float_mask_keeps_the_rows_that_it_has(tmp_path: Path) -> None:
    masks = (torch.arange(16) < torch.arange(1, 17)[:, None]).float()
    numbers = torch.randn(16, 16)

    def loop() -> None:
        model = nn.Linear(16, 1)
        update = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x, mask in DataLoader(TensorDataset(numbers, masks), 8):
            (model(x) * mask).sum().backward()
            update.step()

    trace = trace_loop(tmp_path, loop)
    assert values(trace, "0/0/./batch.1").equal(masks[8:])
    assert not values(trace, "0/0/./batch.0").equal(numbers[8:]), "measurements are generated"
    masks = masks.flip(0)
    follower = trace_loop(tmp_path / "other", loop, role="candidate", reference=str(tmp_path / "trace"))
    assert values(follower, "0/0/./batch.1").equal(masks.flip(0)[8:]), "the rows of the reference"


def test_the_second_step_starts_where_the_first_one_did(tmp_path: Path) -> None:
    """With the script's own parameters and data, the traced step is the script's first one, bit for bit."""
    bare = make_model()
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    F.cross_entropy(bare(x), y).backward()
    optimizer.step()

    def loop() -> None:
        model = make_model()
        update = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(NUM_STEPS):
            F.cross_entropy(model(x), y).backward()
            update.step()
            update.zero_grad()

    trace = trace_loop(tmp_path, loop, parameters="own", data="own")
    for name, parameter in bare.named_parameters():
        assert values(trace, f"0/-/{name}/param_after").equal(parameter)
        assert values(trace, f"0/-/{name}/optim.exp_avg").equal(optimizer.state[parameter]["exp_avg"])


def test_data_that_the_script_keeps_is_recorded_with_a_digest_of_each_row(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rows = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    trace = trace_loop(tmp_path, lambda: train(make_model(), DataLoader(rows, 4), 2), data="own")
    second = rows[8:12]  # the first step took 2 x 4 rows
    assert [values(trace, f"0/0/./batch.{slot}").equal(second[slot]) for slot in (0, 1)] == [True, True]
    end = trace.ranks[0].end
    assert end is not None
    assert {slot: len(digests) for slot, digests in end.samples.items()} == {"0/0": 8, "0/1": 8}
    assert len(set(end.samples["0/0"])) == 8
    assert trace.manifest.attachment is not None
    assert trace.manifest.attachment.keeps_data


def test_an_optimizer_that_steps_its_groups_one_by_one(tmp_path: Path) -> None:
    """As ZeRO does it; the settings of all groups are restored."""

    def loop() -> None:
        model = make_model()
        weights = [list(layer.parameters()) for layer in model.children()]
        groups: list[dict[str, Any]] = [{"params": weights[0]}, {"params": weights[2], "lr": 0.5}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for x, y in make_loader():
            F.cross_entropy(model(x), y).backward()
            every = optimizer.param_groups
            for group in every:
                optimizer.param_groups = [group]
                optimizer.step()
            optimizer.param_groups = every
            optimizer.zero_grad()
            schedule.step()

    end = trace_loop(tmp_path, loop).ranks[0].end
    assert end is not None
    rates = {name: float(end.settings[number]["lr"]) for name, number in end.settings_of.items()}
    assert rates == {"0.weight": 0.1, "0.bias": 0.1, "2.weight": 0.5, "2.bias": 0.5}


def test_a_step_that_only_makes_the_optimizers_state_is_not_the_first(tmp_path: Path) -> None:
    """As DeepSpeed does it with gradients of zero. The state that it leaves is that of the traced step."""

    def loop() -> None:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for x, y in make_loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    trace = trace_loop(tmp_path, loop)
    assert values(trace, "0/-/0.weight/optim.step").item() == 2


def test_evaluation_between_steps_belongs_to_no_step(tmp_path: Path) -> None:
    def loop() -> None:
        model, loader, others = make_model(), make_loader(), make_loader(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            for inputs, _ in others:  # without no_grad, as some scripts do
                model(inputs)
            model.train()

    trace = trace_loop(tmp_path, loop)
    assert microbatches(trace) == microbatches(trace, Kind.OUTPUT) == [0]
    assert {shard.record.shape for t, s in trace.shards.items() if t.kind is Kind.BATCH for shard in s} == {
        (4, 8),
        (4,),
    }


@pytest.mark.own_defaults
def test_recomputation_and_compiled_models(tmp_path: Path) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = make_model(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]

    trace = trace_loop(tmp_path, lambda: train(Recomputed(), make_loader(), 2))
    assert microbatches(trace, Kind.OUTPUT) == [0, 1]
    assert {"inner.0", "head"} <= {t.name for t in trace.shards if t.kind is Kind.OUTPUT}

    (tmp_path / "compiled").mkdir()
    compiled = torch.compile(make_model(), backend="eager")
    trace = trace_loop(tmp_path / "compiled", lambda: train(compiled, make_loader()))  # type: ignore[arg-type]
    assert {".", "0", "2"} <= {t.name for t in trace.shards if t.kind is Kind.OUTPUT}


def test_labels_made_in_the_loop_are_generated_and_those_with_ignored_ones_compared(tmp_path: Path) -> None:
    data = torch.randn(NUM_STEPS, 4, 8)  # no line of the loop draws random numbers

    def loop(ignored: int) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x in data:
            y = torch.tensor([0, 1, 2, ignored])
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = trace_loop(tmp_path, lambda: loop(3))
    found = trace.manifest.attachment
    assert found is not None
    assert found.data == "arguments of the model's call, labels of a loss function"
    assert {"0/0/./batch.0", "0/0/./batch.target"} <= set(map(str, trace.shards))

    (tmp_path / "ignored").mkdir()
    trace = trace_loop(tmp_path / "ignored", lambda: loop(-100))
    assert values(trace, "0/0/labels/batch.target").tolist() == [0, 1, 2, -100]


def test_ids_and_labels_have_a_class_if_the_vocabulary_is_padded(tmp_path: Path) -> None:
    def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()

    def loop(loss: Any) -> None:
        model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 97))
        update = torch.optim.SGD(model.parameters(), lr=1e-2)
        data = torch.arange(512).view(64, 8) * 31 % 97
        for ids, labels in DataLoader(TensorDataset(data, data.flip(0)), 16):
            loss(model(ids), labels).backward()
            update.step()

    for name, loss in (("torch", lambda logits, y: F.cross_entropy(logits.mT, y)), ("own", compute_loss)):
        trace = trace_loop(tmp_path / name, functools.partial(loop, loss))
        for slot in ("0", "1"):
            assert values(trace, f"0/0/./batch.{slot}").max() == 96


def test_random_numbers_that_a_loop_draws_are_generated(tmp_path: Path) -> None:
    """Those of other lines, which made the dataset or the parameters, are not counted."""

    def loop() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        table = torch.randn(100, 8)
        for _ in range(NUM_STEPS):
            for _ in range(2):
                rows, keep = torch.randint(100, (4,)), torch.rand(4) < 0.5
                y = torch.randint(4, (4,)).masked_fill(keep, -100)
                F.cross_entropy(model(table[rows]), y, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = trace_loop(tmp_path, loop)
    drawn = {str(t) for t in trace.shards if t.kind is Kind.BATCH and t.site.slot.startswith("random")}
    assert drawn == {f"0/{number}/./batch.random.{slot}" for number in (0, 1) for slot in ("0.0", "0.1", "1.0")}
    uniform = values(trace, "0/0/./batch.random.0.1")
    assert uniform.min() >= 0
    assert uniform.max() < 1 << 24


def test_a_model_that_returns_its_loss(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.inner(x), labels, reduction="sum") / num_items}

    data = torch.randn(NUM_STEPS, 4, 8)

    def loop() -> None:
        model = WithLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x in data:
            model(x, labels=torch.tensor([0, 1, 2, 3]), num_items=torch.tensor(4))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = trace_loop(tmp_path, loop)
    assert trace.manifest.attachment is not None
    assert trace.manifest.attachment.labels
    assert {"0/0/./batch.0", "0/0/./batch.labels"} <= set(map(str, trace.shards))
    assert values(trace, "0/0/labels/batch.num_items").item() == 4  # what counts something is kept


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self, num_inputs: int, num_outputs: int) -> None:
            super().__init__()
            self.layer = nn.Linear(num_inputs, num_outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    class Generator(Model): ...

    class Judge(Model): ...

    def loop() -> None:
        makes, judges = Generator(3, 8), Judge(8, 1)
        first, second = torch.optim.Adam(judges.parameters()), torch.optim.Adam(makes.parameters())
        for x, _ in make_loader():
            noise = torch.randn(4, 3)
            (judges(makes(noise).detach()) - judges(x)).mean().backward()
            nn.utils.clip_grad_norm_(judges.parameters(), 0.1)
            first.step()
            first.zero_grad()
            judges(makes(noise)).mean().neg().backward()
            nn.utils.clip_grad_norm_(makes.parameters(), 0.1)
            second.step()
            second.zero_grad()
            first.zero_grad()

    trace = trace_loop(tmp_path, loop)
    assert trace.manifest.attachment is not None
    assert trace.manifest.attachment.optimizers == ("Adam", "Adam")
    updated = {t.name for t in trace.shards if t.kind is Kind.PARAM_AFTER}
    assert updated == {"generator.layer.weight", "generator.layer.bias", "judge.layer.weight", "judge.layer.bias"}
    gradients = {t.name: values(trace, str(t)) for t in trace.shards if t.kind is Kind.PARAM_GRAD}
    assert gradients.keys() == updated  # each when its own optimizer steps
    # The judge's gradients are those of its own loss, before they are clipped.
    assert values(trace, "0/-/./grad_norm").item() == pytest.approx(
        torch.cat([gradients[f"judge.layer.{name}"].flatten() for name in ("weight", "bias")]).norm().item()
    )
    assert microbatches(trace, Kind.OUTPUT) == [0]
    calls = {t.call for t in trace.shards if t.name == "judge.layer" and t.kind is Kind.OUTPUT}
    assert calls == {0, 1, 2}


def test_a_step_that_takes_a_closure(tmp_path: Path) -> None:
    def loop() -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in make_loader():

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    trace = trace_loop(tmp_path, loop)
    assert {t.name for t in trace.shards if t.kind is Kind.PARAM_GRAD} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert microbatches(trace, Kind.OUTPUT) == [0]


def test_under_a_default_device_each_loss_is_seen_once(tmp_path: Path) -> None:
    """It is a `__torch_function__` mode, and torch calls losses again inside it."""

    def loop() -> None:
        with torch.device("cpu"):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for _ in range(NUM_STEPS):
                F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4).backward()
                optimizer.step()
                optimizer.zero_grad()

    trace = trace_loop(tmp_path, loop)
    labels = [str(t) for t in trace.shards if t.kind is Kind.BATCH and "target" in t.site.slot]
    assert labels == ["0/0/labels/batch.target"]


def test_what_a_pipeline_schedule_gets_is_generated_for_each_microbatch(tmp_path: Path) -> None:
    data = torch.randn(NUM_STEPS, 8, 8)  # no line of the loop draws random numbers

    def loop() -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        dist.init_process_group("gloo", store=make_hash_store(), rank=0, world_size=1)
        model = make_model()
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x in data:
            schedule.step(x, target=torch.arange(8) % 4)
            optimizer.step()
            optimizer.zero_grad()

    try:
        trace = trace_loop(tmp_path, loop)
    finally:
        dist.destroy_process_group()
    assert trace.manifest.attachment is not None
    assert (trace.manifest.attachment.model, trace.manifest.attachment.num_microbatches) == ("Sequential", 4)
    batches = {str(t): trace.shards[t][0].record.shape for t in trace.shards if t.kind is Kind.BATCH}
    expected = {"0": (2, 8), "target": (2,)}
    assert batches == {f"0/{i}/./batch.{slot}": shape for i in range(4) for slot, shape in expected.items()}


def test_frozen_parts_and_losses_are_not_the_model(tmp_path: Path) -> None:
    def loop() -> None:
        model, teacher, loss = make_model(), make_model().requires_grad_(requires_grad=False), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x, y in make_loader():
            (loss(model(x), y) + F.mse_loss(model(x), teacher(x))).backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = trace_loop(tmp_path, loop)
    assert trace.manifest.attachment is not None
    assert trace.manifest.attachment.model == "Sequential"
    assert microbatches(trace, Kind.OUTPUT) == [0]  # the batch passes twice through the model
    assert {t.call for t in trace.shards if t.name == "0" and t.kind is Kind.OUTPUT} == {0, 1}


def test_why_nothing_was_traced(tmp_path: Path) -> None:
    def once() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    def without_step() -> None:
        model = make_model()
        torch.optim.SGD(model.parameters(), lr=1e-2)
        model(torch.randn(4, 8)).sum().backward()

    assert "ended after its first training step" in watch_loop(tmp_path, once)[0]
    assert "no optimizer stepped (SGD)" in watch_loop(tmp_path, without_step)[0]

    def without_call() -> None:
        weight = nn.Parameter(torch.ones(3))
        update = torch.optim.SGD([weight])
        for _ in range(NUM_STEPS):
            weight.sum().backward()
            update.step()

    assert "SGD stepped, but the script called no module" in watch_loop(tmp_path, without_call)[0]
    assert watch_loop(tmp_path, lambda: make_model()(torch.randn(4, 8))) == []


def test_a_script_that_fails_within_a_step_leaves_no_complete_trace(tmp_path: Path) -> None:
    def fail() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for number in range(NUM_STEPS):
            loss = model(torch.randn(4, 8)).sum()
            if number == 1:
                return  # as after an exception: `close` is called when the process ends
            loss.backward()
            optimizer.step()

    assert "ended within a traced step" in watch_loop(tmp_path, fail)[0]
    rank = Trace(tmp_path / "trace").ranks[0]
    assert rank.end is None
    assert rank.records  # they can still be looked at


def test_what_a_script_begins_after_the_traced_steps_does_not_matter(tmp_path: Path) -> None:
    def draw_ahead() -> None:
        model, batches = make_model(), iter(make_loader())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x, y = next(batches)
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            x, y = next(batches)  # as loaders do that stay one batch ahead

    assert trace_loop(tmp_path, draw_ahead).ranks[0].end is not None


def test_a_script_that_attaches_by_itself_finds_nothing_changed(tmp_path: Path) -> None:
    Plan(out=tmp_path / "trace", stop=False).save(tmp_path / "plan.json")
    problems: list[str] = []
    with (
        mock.patch("ttrace.attach._callbacks", []),
        mock.patch.dict(os.environ, {PLAN_VARIABLE: str(tmp_path / "plan.json")}),
    ):
        before = Attributes(["torch"])
        watch = Watch(problems.append)
        watch.start()
        assert nn.Module.__call__ is not nn.Module._wrapped_call_impl
        on_attach(watch.withdraw)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        session = ttrace.attach(model, optimizer)
        for x, y in make_loader():
            with session.step():
                x, y = session.batch((x, y))
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        watch.close()
        assert list(before.changes()) == []
    assert Trace(tmp_path / "trace").manifest.attachment is None


def test_to_attach_after_the_first_step_is_too_late(tmp_path: Path) -> None:
    def loop() -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        for number, (x, y) in enumerate(make_loader()):
            if number == 2:
                ttrace.attach(model, optimizer)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Plan(out=tmp_path / "trace", stop=False).save(tmp_path / "plan.json")
    with (
        mock.patch("ttrace.attach._callbacks", []),
        mock.patch.dict(os.environ, {PLAN_VARIABLE: str(tmp_path / "plan.json")}),
    ):
        watch = Watch(lambda _: None)
        watch.start()
        on_attach(watch.withdraw)
        with pytest.raises(CaptureError, match="after its first training step"):
            loop()
        watch.close()


COMPILED = """
import torch, torch.nn.functional as F
def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, y) + F.mse_loss(x, x) + torch.rand(1)[0]
x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
torch.jit.script(loss)(x, y).backward()
torch.compile(loss, backend="eager", fullgraph=True)(x, y).backward()
"""


def test_scripted_and_compiled_functions_are_compiled_as_ever(tmp_path: Path) -> None:
    """In a process of its own: torch remembers which functions it has seen."""
    script = tmp_path / "script.py"
    script.write_text(COMPILED)
    Plan(out=tmp_path / "trace").save(tmp_path / "plan.json")
    environment = {**os.environ, PLAN_VARIABLE: str(tmp_path / "plan.json")}
    environment.update(make_variables(environment, tmp_path / "mark"))
    subprocess.run([sys.executable, str(script)], env=environment, timeout=HANG, check=True)
    assert (tmp_path / "mark").exists()


def test_the_hook_knows_the_variables_that_it_cannot_import() -> None:
    text = (HOOK / "sitecustomize.py").read_text()
    assert f'_PLAN, _MARK = "{PLAN_VARIABLE}", "{MARK_VARIABLE}"' in text


def test_a_launcher_that_imports_torch_imports_no_more(tmp_path: Path) -> None:
    """Such as torchrun, in each of whose processes the hook runs."""
    code = (
        "import sys, torch; before = set(sys.modules); from ttrace.automatic.installation import install; install(); "
        "print([m for m in set(sys.modules) - before if not m.startswith('ttrace')], 'ttrace.capture' in sys.modules)"
    )
    environment = {**os.environ, PLAN_VARIABLE: str(tmp_path / "none.json")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANG, check=True
    )
    assert done.stdout.split() == ["[]", "False"]
