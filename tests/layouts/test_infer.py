"""A layout is inferred only if it is the only one, and never with a pending sum or an ordering."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ttrace.layouts.infer import HeldShapes, infer_layout
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.region import Shape
from ttrace.layouts.splits import Split


def held(text: str, shape: Shape, mesh: Mesh) -> HeldShapes:
    layout = Layout.parse(text)
    return [(coord, layout.local_shape(shape, mesh.sizes, coord)) for coord in mesh.coords()]


def found(text: str, shape: Shape, mesh: Mesh) -> str | None:
    layout = infer_layout(shape, held(text, shape, mesh), mesh.sizes)
    return None if layout is None else str(layout)


def test_the_only_layout_that_fits_is_found() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert found("seq/tp hidden", (16, 6), mesh) == "d0/tp d1"
    assert found("seq/dp hidden/tp", (16, 8), mesh) == "d0/dp d1/tp"
    assert found("seq hidden", (16, 6), mesh) == "d0 d1"


def test_uneven_shards_tell_the_axis() -> None:
    """With sizes that do not divide, ranks differ in shape, and equal axis sizes no longer look alike."""
    mesh = Mesh.of(dp=2, tp=2)
    assert found("seq/tp", (16,), mesh) is None
    assert found("seq/tp", (15,), mesh) == "d0/tp"
    assert found("seq/dp", (15,), mesh) == "d0/dp"


def test_two_axes_of_one_size_are_ambiguous() -> None:
    assert found("seq/dp hidden", (16, 6), Mesh.of(dp=2, tp=2)) is None


def test_axes_of_two_factorisations_that_lie_alike_are_one() -> None:
    assert found("seq/tp hidden", (16, 6), Mesh.parse("fsdp=1 tp=2 | efsdp=1 ep=2")) == "d0/tp d1"


def test_an_axis_on_which_all_holders_sit_alike_explains_no_cut() -> None:
    """A microbatch of one data-parallel rank: its holders differ along tp alone."""
    mesh = Mesh.of(dp=2, tp=2)
    holders = [(coord, (8, 6)) for coord in mesh.coords() if coord["dp"] == 1]
    assert str(infer_layout((16, 6), holders, mesh.sizes)) == "d0/tp d1"


def test_two_nested_axes_are_ambiguous_in_their_order() -> None:
    assert found("seq/dp/tp", (16,), Mesh.of(dp=2, tp=4)) is None


def test_two_nested_axes_are_found_when_only_one_order_fits() -> None:
    assert found("seq/dp/tp", (9,), Mesh.of(dp=2, tp=4)) == "d0/dp/tp"


def test_a_pending_sum_is_never_inferred() -> None:
    """A missing all-reduce looks exactly like one, so whole shapes mean replicas, and those are checked."""
    layout = infer_layout((16, 6), held("seq hidden +tp", (16, 6), Mesh.of(tp=4)), {"tp": 4})
    assert layout == Layout.parse("d0 d1")


def test_an_ordering_is_never_inferred() -> None:
    """Zigzag shards have the shapes of blocks: taken for blocks, they fail the check but do not pass."""
    assert found("seq/cp:zigzag", (16,), Mesh.of(cp=4)) == "d0/cp"


def test_shapes_that_no_layout_explains_have_none() -> None:
    mesh = Mesh.of(tp=4)
    assert infer_layout((16, 6), [(coord, (5, 6)) for coord in mesh.coords()], mesh.sizes) is None
    assert infer_layout((16, 6), [(coord, (16,)) for coord in mesh.coords()], mesh.sizes) is None
    assert infer_layout((16,), [(coord, (32,)) for coord in mesh.coords()], mesh.sizes) is None


def test_nothing_is_inferred_from_no_rank() -> None:
    assert infer_layout((16, 6), [], {"tp": 4}) is None


def test_a_scalar_is_replicated() -> None:
    assert infer_layout((), [(coord, ()) for coord in Mesh.of(tp=2).coords()], {"tp": 2}) == Layout(())


words = st.sampled_from(["d0 d1", "d0/dp d1", "d0 d1/tp", "d0/dp d1/tp", "d0/tp/dp d1", "d0/dp/tp d1"])


@given(words, st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_what_is_inferred_gives_every_rank_its_shape(text: str, rows: int, columns: int, dp: int, tp: int) -> None:
    mesh, shape = Mesh.of(dp=dp, tp=tp), (rows, columns)
    seen = held(text, shape, mesh)
    layout = infer_layout(shape, seen, mesh.sizes)
    if layout is not None:
        assert layout.pending == ()
        assert held(str(layout), shape, mesh) == seen


def test_a_stated_split_is_used_for_its_axis_alone() -> None:
    mesh = Mesh.of(cp=2, tp=4)
    seen = held("seq/cp hidden/tp", (16, 32), mesh)
    assert str(infer_layout((16, 32), seen, mesh.sizes, {"cp": Split("zigzag")})) == "d0/cp:zigzag d1/tp"


def test_of_two_axes_the_one_that_is_stated_to_cut_does() -> None:
    mesh = Mesh.of(cp=2, tp=2)
    assert str(infer_layout((16, 6), held("seq/cp hidden", (16, 6), mesh), mesh.sizes, {"cp": Split()})) == "d0/cp d1"
    assert str(infer_layout((16, 6), held("seq hidden", (16, 6), mesh), mesh.sizes, {"cp": Split()})) == "d0 d1"
