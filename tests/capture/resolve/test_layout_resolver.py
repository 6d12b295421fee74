"""A live tensor lies where it states itself, where a framework states, or where a rule states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.support.device_meshes import mesh_of
from tests.support.traces import TraceBuilder
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import LayoutError
from ttrace.layouts.holds import find_held, holds
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.infer import find_pending_axes
from ttrace.layouts.layout import Cut, Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource
from ttrace.layouts.rules import Rules
from ttrace.layouts.splits import Split
from zoo.harness.runs import SimulatedRank

OUTPUT, LOSS = TensorId.parse("0/0/inner/output"), TensorId.parse("0/0/./loss")


def make_resolver(folder: Path, rules: dict[str, str] | None = None) -> LayoutResolver:
    """Rank 3 of cp=2 tp=2, with a reference whose output has 8 tokens of 4 numbers."""
    reference = TraceBuilder(folder / "reference", role="reference")
    reference.record_parts(str(OUTPUT), torch.zeros(2, 8, 4))
    reference.record_parts(str(LOSS), torch.zeros(()))
    reference.close()
    adapter = SimulatedRank(Mesh.of(cp=2, tp=2), 3)
    return LayoutResolver(adapter, Rules.of(rules), ReferenceTrace(folder / "reference"), 1)


def along_tp(local: torch.Tensor, placement: Placement) -> DTensor:
    mesh = mesh_of(torch.tensor([2, 3]), 3, ("tp",))
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def test_a_dtensor_is_placed_among_the_axes_beyond_its_own_mesh(tmp_path: Path) -> None:
    resolver = make_resolver(tmp_path)
    resolver.set_split(Cut("cp", Split("zigzag")))
    placement = resolver.resolve(OUTPUT, along_tp(torch.zeros(2, 4, 2), Shard(2)))
    assert placement is not None
    assert placement.region.shape == (2, 8, 4)
    assert placement.region.dims == (((0, 2),), ((2, 6),), ((2, 4),))
    assert placement.layout == "d0 d1/cp:zigzag d2/tp"
    assert placement.source is LayoutSource.DTENSOR_AND_SHAPES


def test_a_dtensor_of_the_references_shape_is_left_alone(tmp_path: Path) -> None:
    placement = make_resolver(tmp_path).resolve(OUTPUT, along_tp(torch.zeros(2, 8, 2), Shard(2)))
    assert placement is not None
    assert (placement.source, placement.layout) == (LayoutSource.DTENSOR, "d0 d1 d2/tp")


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_where_context_parallel_cuts_the_loss_is_a_summand(tmp_path: Path, is_dtensor: bool) -> None:
    resolver = make_resolver(tmp_path)
    loss = along_tp(torch.zeros(()), Replicate()) if is_dtensor else torch.zeros(())
    before = resolver.resolve(LOSS, loss)
    assert before is None or before.pending == ()
    resolver.set_split(Cut("cp", Split()))
    placement = resolver.resolve(LOSS, loss)
    assert placement is not None
    assert placement.pending == ("cp",)


def test_a_rule_knows_better_of_the_loss(tmp_path: Path) -> None:
    resolver = make_resolver(tmp_path, {"./loss": ""})
    resolver.set_split(Cut("cp", Split()))
    placement = resolver.resolve(LOSS, torch.zeros(()))
    assert placement is not None
    assert placement.pending == ()


@pytest.mark.parametrize(
    ("states", "has_rule", "source"),
    [
        (True, True, LayoutSource.HOLDS),
        (False, True, LayoutSource.RULE),
        (False, False, LayoutSource.HOLDS_OF_INPUT),
    ],
)
def test_a_tensors_own_rows_precede_a_rule_which_precedes_those_of_its_input(
    tmp_path: Path, states: bool, has_rule: bool, source: LayoutSource
) -> None:
    """tests/trace/test_relayout.py has the same for other rules than a trace was recorded with."""
    resolver = make_resolver(tmp_path, {"inner/output": "a b/cp c"} if has_rule else None)
    rows, indices = torch.zeros(2, 4, 4), torch.tensor([1, 3, 5, 7])
    held = find_held(holds(torch.zeros(2, 4), indices, 8, dim=1))
    if states:
        holds(rows, indices, 8, dim=1)
    placement = resolver.resolve(OUTPUT, rows, held=held)
    assert placement is not None
    assert placement.source is source


def test_an_axis_cuts_in_one_order_and_lies_on_the_mesh(tmp_path: Path) -> None:
    resolver = make_resolver(tmp_path)
    resolver.set_split(Cut("cp", Split("zigzag")))
    resolver.set_split(Cut("cp", Split("zigzag")))
    with pytest.raises(LayoutError, match="axis cp cuts some sequences zigzag, others block"):
        resolver.set_split(Cut("cp", Split()))
    with pytest.raises(LayoutError, match="along axis ring, which mesh 'cp=2 tp=2' does not have"):
        resolver.set_split(Cut("ring", Split()))


BATCH = TensorId.parse("0/0/./batch.0")


def make_resolver_of_batch(folder: Path, mesh: Mesh, rank: int, rules: dict[str, str] | None = None) -> LayoutResolver:
    """Make the resolver of a rank whose reference ran one batch of 8 rows."""
    reference = TraceBuilder(folder / "reference", role="reference")
    reference.record_parts(str(BATCH), torch.zeros(8, 3))
    reference.record_parts(str(OUTPUT), torch.zeros(8, 5))
    reference.close()
    return LayoutResolver(SimulatedRank(mesh, rank), Rules.of(rules), ReferenceTrace(folder / "reference"), 1)


def test_rows_that_add_up_to_the_references_are_a_batch_cut_over_the_data_axis(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(dp=2), 1)
    assert resolver.resolve(OUTPUT, torch.zeros(4, 5)) is not None, "whole, as long as nothing is known of a batch"
    resolver.observe_batch(BATCH, (4, 3))
    assert resolver.batch_axes == ("dp",)
    assert resolver.count_microbatch(0) == 0
    rows = resolver.resolve_or_infer(BATCH, torch.zeros(4, 3))
    assert (rows.layout, rows.region.dims[0]) == ("d0/dp d1", ((4, 8),))
    assert resolver.resolve(OUTPUT, torch.zeros(4, 5)) is None, "left to the judge, who sees all ranks"
    loss = resolver.resolve(LOSS, torch.zeros(()))
    assert loss is not None
    assert loss.pending == ("dp",)


def test_what_ranks_with_other_rows_share_has_a_part_of_its_gradient_on_each(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(dp=2), 1)
    resolver.observe_batch(BATCH, (4, 3))
    layout = Layout.parse("a b")
    assert find_pending_axes(Kind.GRAD_OUTPUT, layout, resolver.batch_axes) == ("dp",)
    assert find_pending_axes(Kind.GRAD_OUTPUT, Layout.parse("a/dp b"), resolver.batch_axes) == ()
    assert find_pending_axes(Kind.OUTPUT, layout, resolver.batch_axes) == ()


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2, tp=2), Mesh.of(dp=2, cp=2)])
def test_a_data_axis_cuts_rows_sooner_than_another_of_its_size(tmp_path: Path, mesh: Mesh) -> None:
    resolver = make_resolver_of_batch(tmp_path, mesh, 2)
    resolver.observe_batch(BATCH, (4, 3))
    assert resolver.batch_axes == ("dp",)
    assert resolver.resolve_or_infer(BATCH, torch.zeros(4, 3)).layout == "d0/dp d1"


def test_uneven_rows_are_cut_as_chunks_are(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(dp=3), 2)
    resolver.observe_batch(BATCH, (2, 3))
    assert resolver.batch_axes == ("dp",)


def test_batches_as_large_as_the_references_are_microbatches_of_their_own(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(dp=2), 1)
    resolver.observe_batch(BATCH, (8, 3))
    assert resolver.batch_axes == ()
    assert resolver.count_microbatch(0) == 1


def test_ranks_without_a_named_axis_may_share_a_batch_too(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(ranks=2), 0)
    resolver.observe_batch(BATCH, (4, 3))
    assert resolver.batch_axes == ("ranks",)


def test_a_rule_for_the_batch_says_how_its_rows_are_cut(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(dp=2), 1, {"./batch.*": "b/dp:striped ..."})
    resolver.observe_batch(BATCH, (4, 3))
    assert (resolver.batch_axes, resolver.splits["dp"]) == (("dp",), Split("striped"))
    assert resolver.resolve(OUTPUT, torch.zeros(4, 5)) is None


def test_rows_that_do_not_add_up_name_the_two_ways_out(tmp_path: Path) -> None:
    resolver = make_resolver_of_batch(tmp_path, Mesh.of(ranks=2), 1)
    resolver.observe_batch(BATCH, (3, 3))
    with pytest.raises(LayoutError, match=r"has shape \(3, 3\).*ranks=2.*equal part.*as microbatches"):
        resolver.resolve_or_infer(BATCH, torch.zeros(3, 3))


def write_reference(folder: Path, layout: str, *, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> ReferenceTrace:
    """Write a reference of four ranks, each with rank + 1 everywhere."""
    builder = TraceBuilder(folder, "dp=2 tp=2", role="reference")
    for rank in ranks:
        local = torch.full((2, 2 if "/tp" in layout else 4), rank + 1.0)
        builder.record(rank, str(OUTPUT), local, layout, shape=(2, 4))
    builder.close()
    return ReferenceTrace(folder)


def test_what_is_replayed_is_the_sum_of_all_summands(tmp_path: Path) -> None:
    whole = write_reference(tmp_path / "summed", "a b +tp").tensor(OUTPUT)
    assert whole is not None
    assert whole.equal(torch.full((2, 4), 3.0)), "ranks 0 and 1; the other two are replicas"
    assert write_reference(tmp_path / "summed", "a b +tp").moments(OUTPUT) == (3.0, 3.0)
    cut = write_reference(tmp_path / "cut", "a b/tp +dp").tensor(OUTPUT)
    assert cut is not None
    assert cut.tolist() == [[4.0, 4.0, 6.0, 6.0]] * 2


def test_what_is_not_there_in_full_is_not_replayed(tmp_path: Path) -> None:
    reference = write_reference(tmp_path, "a b/tp", ranks=(0, 2))
    assert reference.tensor(OUTPUT) is None
    assert reference.moments(OUTPUT) is None
