"""Checkpoints of every format give the same tensors, also those that several ranks wrote; others are refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ttrace.checkpoints.checkpoint import open_checkpoint
from ttrace.checkpoints.comparison import Sameness, compare_checkpoints
from ttrace.errors import TTraceError
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks

TENSORS = {
    "layers.0.weight": torch.arange(12.0).reshape(3, 4),
    "layers.0.bias": torch.ones(3, dtype=torch.bfloat16),
    "steps": torch.tensor(3),
}


def write(folder: Path, form: str) -> Path:
    if form == "safetensors":
        save_file(TENSORS, folder / "model.safetensors")
        return folder / "model.safetensors"
    if form == "folder":
        for number, (name, tensor) in enumerate(TENSORS.items()):
            save_file({name: tensor}, folder / f"model-{number}.safetensors")
        return folder
    if form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # versions of torch warn of one process, or of themselves
            save(dict(TENSORS), checkpoint_id=str(folder / "dcp"), no_dist=True)
        return folder / "dcp"
    if form == "old":
        torch.save(TENSORS, folder / "model.pt", _use_new_zipfile_serialization=False)
        return folder / "model.pt"
    torch.save(TENSORS, folder / "pytorch_model.bin")
    return folder if form == "bin" else folder / "pytorch_model.bin"


@pytest.mark.parametrize("form", ["safetensors", "folder", "dcp", "torch", "bin", "old"])
def test_every_format_gives_the_tensors(tmp_path: Path, form: str) -> None:
    read = open_checkpoint(write(tmp_path, form))
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (read.tensors[name].shape, read.tensors[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(read.read(name), tensor)


def test_the_index_of_a_distributed_checkpoint_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, "dcp")
    read = open_checkpoint(path)
    (path / ".metadata").unlink()
    assert all(torch.equal(read.read(name), tensor) for name, tensor in TENSORS.items())


def test_a_file_that_is_missing_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """As of a rank whose part was not copied; torch's own error is no Exception."""
    path = write(tmp_path, "dcp")
    read = open_checkpoint(path)
    for part in path.glob("*.distcp"):
        part.unlink()
    with pytest.raises(TTraceError, match=r"cannot be read as a checkpoint: layers\.0\.weight"):
        read.read("layers.0.weight")


def test_nested_dicts_and_values_have_dotted_names(tmp_path: Path) -> None:
    torch.save({"model": TENSORS, "optim": [{"lr": 0.1}], "step": 3}, tmp_path / "all.pt")
    read = open_checkpoint(tmp_path / "all.pt")
    assert set(read.tensors) == {f"model.{name}" for name in TENSORS}
    assert read.values == {"optim.0.lr": 0.1, "step": 3}


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.__class__.touch, (tmp_path / "ran",))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(TTraceError, match="cannot be read as a checkpoint"):
        open_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["nothing.pt", "empty", "text.pt", "text.safetensors", "broken"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    if name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    if name == "broken":
        (tmp_path / name / ".metadata").write_bytes(b"nothing")
    if name.startswith("text"):
        (tmp_path / name).write_text("some words that are no checkpoint")
    with pytest.raises(TTraceError):
        open_checkpoint(tmp_path / name)


def save_sharded(folder: Path) -> None:
    """On every rank: step under FSDP2, and save model and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # a sum over ranks would be rounded
    optimizer.step()
    states, moments = get_state_dict(model, optimizer)
    save({"model": states, "optim": moments}, checkpoint_id=str(folder))


def test_checkpoints_of_two_and_of_three_ranks_are_the_same(tmp_path: Path) -> None:
    for num_ranks in (2, 3):  # rows that cannot be divided evenly
        on_ranks(num_ranks, save_sharded, tmp_path / str(num_ranks), timeout=HANG)
    found = compare_checkpoints(open_checkpoint(tmp_path / "2"), open_checkpoint(tmp_path / "3"))
    assert found.differences == ()
    assert found.counts[Sameness.SAME] == 16  # weights and biases, two moments and a step count of each
