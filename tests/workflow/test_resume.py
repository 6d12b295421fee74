"""A candidate that goes on from a checkpoint is judged at the first step after it: what is wrong there is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.commands import ROOT, ttrace
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.check import check
from ttrace.judge.verdict import CauseName, Exit, Judgement
from ttrace.trace.reader import Trace
from zoo.harness.runs import SimulatedRank

NUM_STEPS, NUM_TWINS = 3, 2
States = dict[str, Any]
Load = Callable[["Net", torch.optim.Optimizer, States], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        out: torch.Tensor = self.norm(x)
        return out


def train(
    plan: Plan, load: Callable[[Net, torch.optim.Optimizer], None] = lambda *_: None, *, position: int | None = None
) -> States:
    """Train the plan's steps, and return what a script would save.

    With a position, the script has its own data, and this is the step whose data come first.
    """
    torch.manual_seed(plan.first_step)  # a new process initialises otherwise
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    load(model, optimizer)
    for number in range(plan.num_steps):
        with session.step():
            batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
            if position is None:
                batch = session.batch(batch)
            else:
                drawn = torch.Generator().manual_seed(position + number)
                batch = {name: torch.randn(6, 8, generator=drawn) for name in batch}
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """A reference that trains through, its twins, and a candidate up to its checkpoint."""
    return save(tmp_path_factory.mktemp("resume"))


def save(folder: Path, *, position: int | None = None) -> tuple[Path, States]:
    whole = Plan(out=folder / "reference", num_steps=NUM_STEPS, stop=False, full=("*",))
    train(whole, position=position)
    known = {"reference": whole.out}
    for twin in range(1, NUM_TWINS + 1):
        train(
            whole.model_copy(update={**known, "out": folder / f"twin-{twin}", "role": "twin", "twin": twin}),
            position=position,
        )
    before = {**known, "out": folder / "before", "role": "candidate", "num_steps": NUM_STEPS - 1}
    return folder, train(whole.model_copy(update=before), position=position)


@pytest.fixture(scope="module")
def saved_with_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """The same for a script that has its own data."""
    return save(tmp_path_factory.mktemp("data"), position=0)


def judge(saved: tuple[Path, States], out: Path, load: Load, *, position: int | None = None) -> Judgement:
    folder, states = saved
    plan = Plan(
        out=out,
        role="candidate",
        reference=folder / "reference",
        first_step=NUM_STEPS - 1,
        parameters="own",
        stop=False,
        full=("*",),
    )
    train(plan, lambda model, optimizer: load(model, optimizer, deepcopy(states)), position=position)
    twins = [Trace(folder / f"twin-{twin}") for twin in range(1, NUM_TWINS + 1)]
    return check(Trace(folder / "reference"), twins, Trace(out))


def load_all(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def forget_layer(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    """A name that changed, and `strict=False`."""
    states["model"]["layer.1.weight"] = states["model"].pop("layers.1.weight")
    model.load_state_dict(states["model"], strict=False)
    optimizer.load_state_dict(states["optimizer"])


def shift_layers(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    states["model"]["layers.2.weight"] = states["model"]["layers.1.weight"]
    load_all(model, optimizer, states)


def truncate(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    """Weights went through bfloat16."""
    states["model"] = {
        name: value.bfloat16().to(value.dtype) if value.dtype == torch.float32 else value
        for name, value in states["model"].items()
    }
    load_all(model, optimizer, states)


def forget_moments(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    model.load_state_dict(states["model"])
    optimizer.param_groups[0]["lr"] = states["optimizer"]["param_groups"][0]["lr"]


def restart_schedule(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    load_all(model, optimizer, states)
    optimizer.param_groups[0]["lr"] = 1e-2


def forget_buffers(model: Net, optimizer: torch.optim.Optimizer, states: States) -> None:
    """Only parameters were saved."""
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: value for name, value in states["model"].items() if name in names}, strict=False)
    optimizer.load_state_dict(states["optimizer"])


def test_a_checkpoint_that_is_loaded_rightly_passes(saved: tuple[Path, States], tmp_path: Path) -> None:
    judgement = judge(saved, tmp_path, load_all)
    assert judgement.exit is Exit.PASSED, judgement.problems
    steps = {(comparison.id.step, comparison.id.kind.value) for comparison in judgement.comparisons}
    assert {kind for step, kind in steps if step < NUM_STEPS - 1} == {"optim"}
    assert {(2, "param"), (2, "buffer"), (2, "param_grad"), (2, "update"), (2, "optim")} <= steps


@pytest.mark.parametrize(
    ("load", "site", "cause"),
    [
        (forget_layer, "2/-/layers.1.weight/param", CauseName.NOT_LOADED),
        (shift_layers, "2/-/layers.2.weight/param", CauseName.OTHERS_VALUES),
        (truncate, "2/-/layers.0.weight/param", CauseName.WEAKER_DTYPE),
        (forget_buffers, "2/-/norm.running_mean/buffer", CauseName.NOT_LOADED),
        (forget_moments, "2/-/layers.0.weight/update", CauseName.STEP_COUNT),
        (restart_schedule, "2/-/layers.0.weight/update", CauseName.OPTIMIZER_SETTINGS),
    ],
)
def test_what_is_not_loaded_rightly_has_its_cause(
    saved: tuple[Path, States], tmp_path: Path, load: Load, site: str, cause: CauseName
) -> None:
    judgement = judge(saved, tmp_path, load)
    assert judgement.exit is Exit.FOUND
    first = judgement.findings[0]
    assert (str(first.comparison.id), first.cause.name) == (site, cause)


@pytest.mark.parametrize(("position", "words"), [(2, ""), (0, "step 0: after the checkpoint, samples are repeated")])
def test_data_of_the_script_go_on_where_they_were(
    saved_with_data: tuple[Path, States], tmp_path: Path, position: int, words: str
) -> None:
    judgement = judge(saved_with_data, tmp_path, load_all, position=position)
    assert judgement.exit is (Exit.FOUND if words else Exit.PASSED), judgement.problems
    if words:
        first = judgement.findings[0]
        assert (str(first.comparison.id), first.cause.name) == ("2/0/./input", CauseName.OTHERS_VALUES)
        assert words in first.cause.sentence


def test_data_that_no_step_had_are_not_judged(saved_with_data: tuple[Path, States], tmp_path: Path) -> None:
    judgement = judge(saved_with_data, tmp_path, load_all, position=9)
    assert judgement.exit is Exit.UNJUDGED
    assert "fed other data" in " ".join(judgement.problems)


def test_one_step_leaves_nothing_before_the_checkpoint(tmp_path: Path) -> None:
    ran = ttrace(
        "run", "--reference", "true", "--candidate", "true", "--resume", "true", "--out", str(tmp_path / "run")
    )
    assert ran.returncode == 2
    assert "--resume needs --steps of at least 2" in ran.stderr


nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
TORCHRUN = "torchrun --standalone --nproc-per-node"


def resume(tmp_path: Path, reference: str, candidate: str, second: str) -> CompletedProcess[str]:
    """Run three steps of which the second command trains the last, from the checkpoint of the first."""
    return ttrace(
        *("run", "--steps", "3", "--twins", "2", "--no-repeat", "--out", str(tmp_path / "run")),
        *("--reference", f"{reference} --steps 3"),
        *("--candidate", f"{candidate} --steps 2 --save {tmp_path}/two"),
        *("--resume", f"{second} --steps 1 --load {tmp_path}/two"),
    )


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [nightly("", 0), ("--bug", 1), ("--forget", 1)])
def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path, flag: str, code: int) -> None:
    script = f"{ROOT}/examples/checkpoint.py"
    ran = resume(tmp_path, f"python {script}", f"{TORCHRUN} 2 {script}", f"{TORCHRUN} 4 {script} {flag}")
    assert ran.returncode == code, ran.stdout + ran.stderr


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [nightly("", 0), ("--bug", 1)])
def test_tensor_parallelism_goes_on_with_another_number_of_ranks(tmp_path: Path, flag: str, code: int) -> None:
    """With uneven shares of a vocabulary on both."""
    script = f"{ROOT}/tests/support/tensor_parallel_checkpoint.py"
    ran = resume(tmp_path, f"python {script}", f"{TORCHRUN} 2 {script}", f"{TORCHRUN} 4 {script} {flag}")
    assert ran.returncode == code, ran.stdout + ran.stderr
    if flag:
        words = " ".join(ran.stdout.split())
        assert "4.weight/param is the first wrong tensor" in words
        assert "the right values in the wrong place along dim 0" in words


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.nightly
@pytest.mark.parametrize(("flag", "code"), [("", 0), ("--forget", 1)])
def test_the_trainer_of_transformers_goes_on(tmp_path: Path, flag: str, code: int) -> None:
    """By its own checkpoints; it counts steps from the start of all."""
    script = f"python {ROOT}/tests/support/trainer_checkpoint.py"
    ran = ttrace(
        *("run", "--steps", "3", "--twins", "2", "--no-repeat", "--out", str(tmp_path / "run")),
        *("--reference", f"{script} --steps 3 --save {tmp_path}/reference"),
        *("--candidate", f"{script} --steps 2 --save {tmp_path}/saved"),
        *("--resume", f"{script} --steps 3 --load {tmp_path}/saved/checkpoint-2 {flag}"),
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    if flag:
        assert "the optimizer counts this as step 1, the reference's as step 3" in " ".join(ran.stdout.split())


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("", 0), nightly("--forget", 1)])
def test_zero_goes_on_with_another_number_of_ranks(tmp_path: Path, flag: str, code: int) -> None:
    """By DeepSpeed's universal checkpoints; parts of the flat copy end within parameters, and the last has padding."""
    script = f"{ROOT}/tests/support/deepspeed_checkpoint.py"
    ran = resume(tmp_path, f"python {script}", f"{TORCHRUN} 2 {script}", f"{TORCHRUN} 4 {script} {flag}")
    assert ran.returncode == code, ran.stdout + ran.stderr
    if flag:
        words = " ".join(ran.stdout.split())
        assert "0.weight/update is the first wrong tensor" in words
        assert "the optimizer counts this as step 1, the reference's as step 3" in words


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("", 0), nightly("--forget", 1)])
def test_megatron_goes_on_with_stages_in_place_of_tensor_parallelism(tmp_path: Path, flag: str, code: int) -> None:
    """By megatron-core's own distributed checkpoints."""
    script = f"-m zoo.harness.megatron.script {ROOT}/tests/support/megatron_checkpoint.py"
    ran = resume(
        tmp_path,
        f"{TORCHRUN} 1 {script}",
        f"{TORCHRUN} 2 {script} --tp 2",
        f"{TORCHRUN} 2 {script} --pp 2 --first 2 {flag}",
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
