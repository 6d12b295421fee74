"""The notation reads back, resolves to regions, and decides coverage without looking at every rank."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrace.errors import LayoutError
from ttrace.layouts.layout import Cut, Dim, Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.ranges import Ranges, merge
from ttrace.layouts.region import TILING, measure_coverage
from ttrace.layouts.splits import Split, split


@split
def askew(size: int, rank: int, world: int, lead: int, trail: int) -> Ranges:
    """Not a good split: blocks that begin late and end late lose elements and hold others twice."""
    step = -(-size // world)
    return ((min(rank * step + lead, size), min((rank + 1) * step + trail, size)),)


@pytest.mark.parametrize(
    "text",
    [
        "seq/cp:zigzag/tp batch/dp hidden +ep",
        "vocab/tp:padded(128) hidden",
        "ffn/tp:fused(2) hidden/dp",
        "... hidden/tp",
        "hidden +tp +cp",
        "",
    ],
)
def test_a_layout_reads_back_as_it_was_written(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_a_block_split_is_not_spelled_out() -> None:
    assert str(Layout.parse("seq/tp:block")) == "seq/tp"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seq/tp hidden/tp",
            "layout 'seq/tp hidden/tp' names axis tp twice; an axis either cuts one dim or is summed over",
        ),
        ("seq/tp hidden +tp", "names axis tp twice"),
        ("seq/tp:padded/cp", "layout 'seq/tp:padded/cp': a padded dim is cut by one axis only"),
        ("... seq ...", "'...' may be used once, and cannot be cut"),
        (".../tp", "'...' may be used once, and cannot be cut"),
        ("3seq", "'3seq' is not dim[/axis[:split]]..., for instance seq/cp:zigzag/tp"),
        ("seq//tp", "'seq//tp' is not dim[/axis[:split]]..."),
        ("seq/t-p", "'t-p' is not axis[:split], for instance cp:zigzag"),
        ("seq/cp:zagzig", "'zagzig' is not a split. Known: "),
        ("seq +", "layout 'seq +': '+' is not +axis, for instance +tp"),
        ("seq ++tp", "'++tp' is not +axis"),
    ],
)
def test_a_wrong_layout_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout.parse(text)


def test_the_order_of_axes_is_the_order_of_cuts() -> None:
    sizes, coord = {"tp": 2, "cp": 2}, {"tp": 1, "cp": 0}
    assert Layout.parse("seq/cp:zigzag/tp").region((16,), sizes, coord).dims == (((12, 16),),)
    assert Layout.parse("seq/tp/cp:zigzag").region((16,), sizes, coord).dims == (((8, 10), (14, 16)),)


def test_dots_stand_for_any_number_of_uncut_dims() -> None:
    layout = Layout.parse("seq/cp ... hidden/tp")
    sizes, coord = {"tp": 2, "cp": 2}, {"tp": 1, "cp": 1}
    assert layout.region((4, 6), sizes, coord).local_shape == (2, 3)
    assert layout.region((4, 3, 5, 6), sizes, coord).local_shape == (2, 3, 5, 3)
    with pytest.raises(LayoutError, match=r"has 3 dims, the tensor has 1. Name every dim, or write '\.\.\.'"):
        layout.region((4,), sizes, coord)


def test_a_wrong_number_of_dims_names_both() -> None:
    with pytest.raises(LayoutError, match=r"layout 'seq hidden' has 2 dims, the tensor has 3"):
        Layout.parse("seq hidden").coverage((1, 2, 3), {})


def test_an_axis_the_mesh_does_not_have_is_one_rank() -> None:
    assert Layout.parse("seq/cp hidden/tp").region((4, 6), {}, {}).is_whole


def test_padding_is_in_the_local_shape_but_not_in_the_region() -> None:
    layout, sizes, coord = Layout.parse("vocab/tp:padded(4) hidden"), {"tp": 2}, {"tp": 1}
    assert layout.local_shape((9, 3), sizes, coord) == (8, 3)
    assert layout.region((9, 3), sizes, coord).local_shape == (1, 3)


def test_pending_axes_do_not_cut() -> None:
    layout = Layout.parse("seq/cp hidden +tp")
    assert layout.axes == {"cp", "tp"}
    assert layout.without_pending() == Layout.parse("seq/cp hidden")
    assert layout.region((4, 6), {"cp": 2, "tp": 2}, {"cp": 0, "tp": 1}).local_shape == (2, 6)


def test_the_global_shape_of_an_even_layout_is_known_from_one_rank() -> None:
    layout, sizes = Layout.parse("seq/cp/tp ... hidden"), {"cp": 2, "tp": 4}
    assert layout.global_shape((3, 5, 7), sizes) == (24, 5, 7)


def test_coverage_does_not_depend_on_the_number_of_ranks() -> None:
    """Sixteen million ranks: decided dim by dim, from a few hundred regions."""
    sizes = {"tp": 8, "cp": 32, "dp": 256, "ep": 256}
    layout = Layout.parse("seq/cp:zigzag/tp batch/dp expert/ep")
    assert layout.coverage((4096, 512, 256), sizes) == TILING


askew_splits = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda args: Split("askew", args))


@given(
    shape=st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5)),
    splits=st.tuples(*[st.one_of(askew_splits, st.just(Split()))] * 3),
    worlds=st.tuples(*[st.integers(1, 4)] * 3),
)
@settings(deadline=None)
def test_coverage_per_dim_is_coverage_of_all_regions(
    shape: tuple[int, int, int], splits: tuple[Split, Split, Split], worlds: tuple[int, int, int]
) -> None:
    """For layouts that are wrong too: the numbers and the first places agree."""
    dims = tuple(Dim(f"d{axis}", (Cut(axis, how),)) for axis, how in zip("abc", splits, strict=True))
    layout, mesh = Layout(dims), Mesh.of(**dict(zip("abc", worlds, strict=True)))
    regions = [layout.region(shape, mesh.sizes, coord) for coord in mesh.coords()]
    assert layout.coverage(shape, mesh.sizes) == measure_coverage(regions)


def test_regions_of_a_layout_are_merged() -> None:
    region = Layout.parse("seq/cp:zigzag").region((8,), {"cp": 2}, {"cp": 1})
    assert region.dims == (((2, 6),),)
    assert region.dims[0] == merge(region.dims[0])
