"""The command line on the device: examples, a sum in random order, the device's errors, defaults of torch."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SCRIPTS, script, ttrace

pytestmark = pytest.mark.slow

EXAMPLES = {
    "ddp": "--bug loss",
    "dtensor_tp": "--bug",
    "fsdp2": "",
    "hidden_allreduce": "--bug",
    "own_split": "--bug",
    "pipelining": "--bug",
    "transformers_tp": "--bug",
    "unchanged": "--bug",
}
LAGS = ("0", "1000")
IN_CI = (("dtensor_tp", "1000"), ("unchanged", "0"))
WITH_SAMPLER = ("ddp", "unchanged")
"""Under a default device, torch's own DistributedSampler refuses the generator that it makes."""
QUICKLY = ("--no-isolate", "--no-repeat")
"""Without what follows a finding."""
DEFAULT_DEVICE = """
import os, runpy, sys, torch
torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.set_default_device("emu")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAILING = """
import torch, ttrace
model = torch.nn.Embedding(4, 8, device="emu")
session = ttrace.attach(model)
with session.step():
    model(torch.tensor([9], device="emu"))
    for _ in range(50):
        model(torch.tensor([1], device="emu"))
    torch.accelerator.synchronize()
"""

STREAMED = """
import os, sys, torch, torch.distributed as dist, ttrace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def build():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 16))

world = int(os.environ.get("WORLD_SIZE", "1"))
torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
if world == 1:
    model = ttrace.streamed(build, by=sys.argv[1], num_microbatches=2, device="emu")
else:
    model = build().to("emu")
    if "--bug" in sys.argv:
        model[2].register_forward_hook(lambda module, args, output: 1.5 * output)
    fully_shard(model, mesh=init_device_mesh("emu", (world,), mesh_dim_names=("dp",)))
session = ttrace.attach(model)
with session.step():
    for _ in range(2 // world):
        x = session.batch(torch.randn(4, 16, device="emu"))
        (model(x).square().mean() * world / 2).backward()
if world > 1:
    dist.destroy_process_group()
"""
COHERENT = """
import os, sys, torch, torch.distributed as dist, ttrace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

world = int(os.environ.get("WORLD_SIZE", "1"))
torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 64, bias=False))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_((torch.randn_like(parameter) + 1) / 8)  # trained weights have little cancellation
model.to("emu")
if world > 1:
    mesh = init_device_mesh("emu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "--bug" in sys.argv:
        model[1].register_forward_hook(lambda module, args, output: output * (1 + 1e-3 * dist.get_rank()))
session = ttrace.attach(model)
with session.step():
    x = session.batch(torch.randn(4, 64, device="emu") + 1)
    model(x).square().mean().backward()
if world > 1:
    dist.destroy_process_group()
"""
SWEEP = """
reference = "python examples/hidden_allreduce.py --device emu"
candidate = "torchrun --standalone --nproc-per-node {tp} examples/hidden_allreduce.py --device emu {bug}"

[axes]
tp = [1, 2]
bug = "--bug"

[derived]
ranks = "tp"
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_whole = metafunc.config.getoption("--all")
    if "lag" in metafunc.fixturenames:
        cases = itertools.product(EXAMPLES, LAGS) if is_whole else IN_CI
        metafunc.parametrize(("example", "lag"), list(cases))
    elif "example" in metafunc.fixturenames:
        names = EXAMPLES if is_whole else [name for name, _ in IN_CI]
        metafunc.parametrize("example", [name for name in names if name not in WITH_SAMPLER])


def run_example(
    example: str, out: Path, flags: str = "", *, before: str = "", more: tuple[str, ...] = ("--twins", "1")
) -> subprocess.CompletedProcess[str]:
    path = f"{before} examples/{example}.py --device emu".strip()
    candidate = f"torchrun --standalone --nproc-per-node 2 {path} {flags}"
    return ttrace("run", "--reference", f"python {path}", "--candidate", candidate, "--out", str(out), *more)


def test_an_example_passes_and_its_bug_is_found(
    example: str, lag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMU_LAG_MS", lag)
    clean = run_example(example, tmp_path / "clean")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    if EXAMPLES[example]:
        wrong = run_example(example, tmp_path / "bug", EXAMPLES[example], more=("--twins", "1", *QUICKLY))
        assert wrong.returncode == 1, wrong.stdout + wrong.stderr


def test_an_example_passes_under_a_default_device(example: str, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(DEFAULT_DEVICE)
    clean = run_example(example, tmp_path / "run", before=str(wrapper))
    assert clean.returncode == 0, clean.stdout + clean.stderr


def test_sums_in_random_order_are_no_finding_and_hide_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_RANDOM_SUMS", "1")
    monkeypatch.setenv("EMU_LAG_MS", "0")
    clean = run_example("dtensor_tp", tmp_path / "clean", more=())
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "note: the reference is not deterministic" in clean.stdout
    assert "twin 3/3" in clean.stderr
    assert "launch of its own" not in clean.stderr
    wrong = run_example("dtensor_tp", tmp_path / "bug", "--bug", more=QUICKLY)
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "layers.1.gated/grad_input" in wrong.stdout


@pytest.mark.skipif("not config.getoption('--all')", reason="takes a minute: --all")
def test_one_accumulator_for_a_long_sum_is_no_finding_and_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as many terms round quite differently, where all have one sign: twins must take sums in parts too."""
    monkeypatch.setenv("EMU_ONE_ACCUMULATOR", "1")
    monkeypatch.setenv("EMU_LAG_MS", "0")
    path = script(tmp_path, COHERENT).split()[-1]
    for flag, expected in ("", 0), ("--bug", 1):
        candidate = f"torchrun --standalone --nproc-per-node 2 {path} {flag}"
        options = ("--own-parameters", "--out", str(tmp_path / f"run{flag}"), *QUICKLY)
        ran = ttrace("run", "--reference", f"python {path}", "--candidate", candidate, *options)
        assert ran.returncode == expected, ran.stdout + ran.stderr


def test_an_error_of_the_device_is_the_scripts_own(tmp_path: Path) -> None:
    failed = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *script(tmp_path, FAILING).split())
    assert failed.returncode == 2
    output = failed.stdout + failed.stderr + "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "AcceleratorError: emu: a kernel failed" in output
    assert "could not be recorded" not in output


@pytest.mark.skipif("not config.getoption('--all')", reason="takes a minute: --all")
def test_a_finding_is_followed_up_and_a_clean_run_tested(tmp_path: Path) -> None:
    wrong = run_example("dtensor_tp", tmp_path / "bug", "--bug", more=("--record", "sketch"))
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "wrong by itself" in wrong.stdout
    assert run_example("dtensor_tp", tmp_path / "clean").returncode == 0
    assert ttrace("selftest", str(tmp_path / "clean")).returncode == 0


@pytest.mark.skipif("not config.getoption('--all')", reason="takes a minute: --all")
@pytest.mark.parametrize("by", ["operators", "blocks"])
def test_a_streamed_reference_is_as_good_as_a_whole_one(by: str, tmp_path: Path) -> None:
    path = script(tmp_path, STREAMED).split()[-1]
    for flag, expected in ("", 0), ("--bug", 1):
        candidate = f"torchrun --standalone --nproc-per-node 2 {path} {by} {flag}"
        out = tmp_path / f"run{flag}"
        ran = ttrace("run", "--reference", f"python {path} {by}", "--candidate", candidate, "--out", str(out), *QUICKLY)
        assert ran.returncode == expected, ran.stdout + ran.stderr


@pytest.mark.skipif("not config.getoption('--all')", reason="takes a minute: --all")
def test_a_sweep_tells_right_layouts_from_wrong_ones(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    swept = ttrace("sweep", str(path), "--out", str(tmp_path / "sweep"), *QUICKLY)
    assert swept.returncode == 1, swept.stdout + swept.stderr
    assert "fails iff tp > 1 and bug" in swept.stdout


@pytest.mark.skipif("not config.getoption('--all')", reason="takes several minutes: --all")
@pytest.mark.timeout(3600)
def test_the_script_for_a_first_run_finds_everything_right(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "EMU_LAG_MS": "0"}
    command = ["examples/first_gpu_run.sh", "emu", str(tmp_path / "first")]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "first.tar.gz").stat().st_size < 5_000_000
