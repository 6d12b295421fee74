"""A ledger alone shows unlike ranks, lost messages and unlike layers. They are noted, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ledgers import make_collective, write_ledgers
from ttrace.judge.notes import note_communication
from ttrace.layouts.ids import Kind, Phase, TensorId
from ttrace.layouts.region import Region
from ttrace.trace.collectives import Collective, encode_collective
from ttrace.trace.format import End, Manifest, ModuleInfo, Record
from ttrace.trace.reader import Trace
from ttrace.trace.writer import Writer

LAYERS = 6


def test_equal_ranks_are_not_noted(tmp_path: Path) -> None:
    ledger = [make_collective(), make_collective("all_gather", axes=("tp",), shape=(2,), num_bytes=8)]
    other = [ledger[0], make_collective("all_gather", axes=("tp",), shape=(3,), num_bytes=12)]
    assert note_communication(write_ledgers(tmp_path, "tp=2", [ledger, other])) == [], "gathers may be uneven"


@pytest.mark.parametrize(
    "other",
    [
        make_collective("broadcast"),
        make_collective(dtype="bfloat16", num_bytes=8),
        make_collective(num_bytes=32, shape=(8,)),
        make_collective(reduction="max"),
    ],
    ids=["operation", "dtype", "size", "reduction"],
)
def test_ranks_of_one_group_that_issue_different_collectives_are_noted(tmp_path: Path, other: Collective) -> None:
    (note,) = note_communication(write_ledgers(tmp_path, "tp=2", [[make_collective()], [other]]))
    assert "ranks 0 and 1 issue different collectives over tp: number 1 is all_reduce (sum) over tp" in note


def test_groups_are_compared_each_for_itself(tmp_path: Path) -> None:
    first, second = make_collective(axes=("tp",)), make_collective(axes=("dp",))
    ledgers = [[first, second], [second, first], [second, first], [first, second]]
    assert note_communication(write_ledgers(tmp_path, "dp=2 tp=2", ledgers)) == []


def test_a_rank_that_issues_fewer_is_noted(tmp_path: Path) -> None:
    trace = write_ledgers(tmp_path, "tp=2", [[make_collective()] * 3, [make_collective()] * 2])
    assert note_communication(trace) == ["rank 0 issues 3 collectives over tp, and rank 1 issues 2"]


def test_messages_are_matched_by_their_two_ends(tmp_path: Path) -> None:
    sent, received = make_collective("send", peer=1), make_collective("recv", peer=0)
    assert note_communication(write_ledgers(tmp_path / "both", "pp=2", [[sent] * 2, [received] * 2])) == []
    (note,) = note_communication(write_ledgers(tmp_path / "lost", "pp=2", [[sent] * 2, [received]]))
    assert "rank 0 sends 2 messages to rank 1, which receives 1 from it" in note


def write_layers(folder: Path, without: set[tuple[str, Phase]], *, frozen: str = "") -> Trace:
    """Write a trace of layers that all communicate alike, except for some."""
    modules = {f"layers.{i}.{name}": name for i in range(LAYERS) for name in ("up", "down")}
    manifest = Manifest(
        role="candidate",
        rank=0,
        num_ranks=1,
        mesh="tp=1",
        seed=0,
        modules={name: ModuleInfo(type=kind) for name, kind in modules.items()},
    )
    writer = Writer(folder, manifest)
    for name, kind in modules.items():
        phase = Phase.BACKWARD if kind == "up" else Phase.FORWARD
        if (name, phase) not in without:
            writer.write_collective(encode_collective(make_collective(module=name, phase=phase)))
        writer.write_collective(encode_collective(make_collective("all_gather", name, phase, issuer="FSDP2")))
        for of in (Kind.OUTPUT, Kind.GRAD_INPUT):
            if name != frozen:
                tensor = torch.ones(1)
                writer.write(Record(TensorId.of(0, 0, name, of), (1,), tensor.dtype, Region.whole((1,))), tensor)
    writer.close(End(num_steps=1))
    return Trace(folder)


def test_a_layer_that_does_not_reduce_is_noted(tmp_path: Path) -> None:
    (note,) = note_communication(write_layers(tmp_path, {("layers.2.up", Phase.BACKWARD)}))
    assert note == (
        "in the backward of layers.2.up, nothing is communicated; in that of layers.1.up and 2 more, all_reduce over "
        "tp runs"
    )


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_the_first_and_the_last_layer_may_differ(tmp_path: Path, layer: int) -> None:
    assert note_communication(write_layers(tmp_path, {(f"layers.{layer}.up", Phase.BACKWARD)})) == []


def test_a_layer_without_a_backward_pass_is_not_noted(tmp_path: Path) -> None:
    frozen = "layers.2.up"
    assert note_communication(write_layers(tmp_path, {(frozen, Phase.BACKWARD)}, frozen=frozen)) == []
