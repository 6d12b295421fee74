"""This module proves the layout of a DeepSeek-V3-shaped model on 16,384 ranks, and measures what that costs.

Coverage is a property of a layout and a shape, so the cost follows the distinct layouts and axis sizes, not
ranks x tensors. A tensor that only some ranks hold (the layers of a stage, the experts of an expert-parallel
rank) is proved in two steps: exactly one index of each distributing axis holds it, and its layout tiles it
over the others.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ttrace.errors import LayoutError
from ttrace.layouts.ids import Kind, Site
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Coord, Mesh
from ttrace.layouts.region import Region, Shape
from ttrace.layouts.rules import Rules

SECONDS, GIB, LIST_SECONDS = 60.0, 2.0, 5.0

MESHES = (
    "pp=4 dp=8 cp=2 tp=4 | pp=4 edp=4 ep=16 etp=1",
    "pp=8 dp=32 cp=2 tp=4 | pp=8 edp=8 ep=32 etp=1",
    "pp=16 dp=128 cp=2 tp=4 | pp=16 edp=16 ep=64 etp=1",
)

RULES = {
    # What is not named below: norms, the router, the small MLA projections, whole on every rank.
    "*/param": "...",
    "embed.weight/param": "vocab/tp:padded(128) hidden",
    "lm_head.weight/param": "vocab/tp:padded(128) hidden",
    "*.attn.q_b.weight/param": "head/tp rank",
    "*.attn.kv_b.weight/param": "head/tp rank",
    "*.attn.o.weight/param": "hidden head/tp",
    "*.gate_up.weight/param": "ffn/tp:fused(2) hidden",
    "*.mlp.down.weight/param": "hidden ffn/tp",
    "*.shared.down.weight/param": "hidden ffn/tp",
    "*.experts.*.gate.weight/param": "ffn/etp hidden",
    "*.experts.*.up.weight/param": "ffn/etp hidden",
    "*.experts.*.down.weight/param": "hidden ffn/etp",
    # Sequence parallel: between blocks the sequence is cut by cp and then tp, inside them by cp only.
    "*/input": "seq/cp:zigzag/tp batch/dp ...",
    "*/output": "seq/cp:zigzag/tp batch/dp ...",
    "embed/input": "seq/cp:zigzag batch/dp",
    "lm_head/input": "seq/cp:zigzag batch/dp hidden",
    "lm_head/output": "seq/cp:zigzag batch/dp vocab/tp:padded(128)",
    "*.attn.q_b/input": "seq/cp:zigzag batch/dp rank",
    "*.attn.q_b/output": "seq/cp:zigzag batch/dp head/tp",
    "*.attn.kv_b/input": "seq/cp:zigzag batch/dp rank",
    "*.attn.kv_b/output": "seq/cp:zigzag batch/dp head/tp",
    "*.attn.core/input": "seq/cp:zigzag batch/dp head/tp",
    "*.attn.core/output": "seq/cp:zigzag batch/dp head/tp",
    "*.attn.o/input": "seq/cp:zigzag batch/dp head/tp",
    "*.gate_up/input": "seq/cp:zigzag batch/dp hidden",
    "*.gate_up/output": "seq/cp:zigzag batch/dp ffn/tp:fused(2)",
    "*.down/input": "seq/cp:zigzag batch/dp ffn/tp",
    # Dispatched tokens: each replica of an expert has its share of them.
    "*.experts.*/input": "token/edp:balanced hidden",
    "*.experts.*/output": "token/edp:balanced hidden",
    "*.experts.*.gate/output": "token/edp:balanced ffn/etp",
    "*.experts.*.up/output": "token/edp:balanced ffn/etp",
    "*.experts.*.down/output": "token/edp:balanced hidden +etp",
}


@dataclass(frozen=True)
class Model:
    """The sizes of DeepSeek-V3, and of one step that is traced."""

    num_layers: int = 61
    num_dense: int = 3
    num_experts: int = 256
    num_chosen: int = 8
    vocab: int = 129280
    hidden: int = 7168
    num_heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    rope: int = 64
    head: int = 128
    ffn: int = 18432
    expert_ffn: int = 2048
    seq: int = 4096
    batch: int = 256


@dataclass(frozen=True)
class Tensor:
    """A logical tensor, and per distributing axis the unit (block of the model, expert) it belongs to."""

    site: Site
    shape: Shape
    units: tuple[tuple[str, int], ...]


Holdings = Mapping[str, Sequence[Collection[int]]]
"""Per distributing axis, the units that each index of it says it holds."""


def tensors(model: Model) -> Iterator[Tensor]:
    """Every parameter and traced activation; block 0 is the embedding, the last one norm and head."""
    m, tokens = model, (model.seq, model.batch)
    yield from _module("embed", 0, weight=(m.vocab, m.hidden), reads=tokens, makes=(*tokens, m.hidden))
    for layer in range(m.num_layers):
        name, block, stream = f"layers.{layer}", layer + 1, (*tokens, m.hidden)
        yield from _module(name, block, reads=stream, makes=stream)
        for norm in ("attn_norm", "mlp_norm"):
            yield from _module(f"{name}.{norm}", block, weight=(m.hidden,), reads=stream, makes=stream)
        yield from _attention(f"{name}.attn", block, m)
        yield from (_mlp(f"{name}.mlp", block, m, m.ffn) if layer < m.num_dense else _moe(f"{name}.moe", block, m))
    last, stream = m.num_layers + 1, (*tokens, m.hidden)
    yield from _module("norm", last, weight=(m.hidden,), reads=stream, makes=stream)
    yield from _module("lm_head", last, weight=(m.vocab, m.hidden), reads=stream, makes=(*tokens, m.vocab))


def _attention(name: str, block: int, m: Model) -> Iterator[Tensor]:
    tokens = (m.seq, m.batch)
    query, key_value, value = m.num_heads * (m.head + m.rope), m.num_heads * 2 * m.head, m.num_heads * m.head
    yield from _module(name, block, reads=(*tokens, m.hidden), makes=(*tokens, m.hidden))
    for part, size, reads in (
        ("q_a", m.q_rank, m.hidden),
        ("q_b", query, m.q_rank),
        ("kv_a", m.kv_rank + m.rope, m.hidden),
        ("kv_b", key_value, m.kv_rank),
        ("o", m.hidden, value),
    ):
        yield from _linear(f"{name}.{part}", block, tokens, (size, reads))
    for norm, size in (("q_norm", m.q_rank), ("kv_norm", m.kv_rank)):
        activation = (*tokens, size)
        yield from _module(f"{name}.{norm}", block, weight=(size,), reads=activation, makes=activation)
    yield from _module(f"{name}.core", block, reads=(*tokens, query), makes=(*tokens, value))


def _mlp(name: str, block: int, m: Model, ffn: int) -> Iterator[Tensor]:
    tokens = (m.seq, m.batch)
    yield from _module(name, block, reads=(*tokens, m.hidden), makes=(*tokens, m.hidden))
    yield from _linear(f"{name}.gate_up", block, tokens, (2 * ffn, m.hidden))
    yield from _linear(f"{name}.down", block, tokens, (m.hidden, ffn))


def _moe(name: str, block: int, m: Model) -> Iterator[Tensor]:
    tokens = (m.seq, m.batch)
    yield from _module(name, block, reads=(*tokens, m.hidden), makes=(*tokens, m.hidden))
    yield from _linear(f"{name}.router", block, tokens, (m.num_experts, m.hidden))
    yield Tensor(Site(f"{name}.router.bias", Kind.PARAM), (m.num_experts,), (("pp", block),))
    yield from _mlp(f"{name}.shared", block, m, m.expert_ffn)
    dispatched = (m.seq * m.batch * m.num_chosen // m.num_experts,)
    for expert in range(m.num_experts):
        units = (("pp", block), ("ep", expert))
        yield from _expert(f"{name}.experts.{expert}", units, dispatched, (m.expert_ffn, m.hidden))


def _expert(name: str, units: tuple[tuple[str, int], ...], tokens: Shape, size: tuple[int, int]) -> Iterator[Tensor]:
    ffn, hidden = size
    for kind in (Kind.INPUT, Kind.OUTPUT):
        yield Tensor(Site(name, kind), (*tokens, hidden), units)
    for part, out, reads in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        yield Tensor(Site(f"{name}.{part}.weight", Kind.PARAM), (out, reads), units)
        yield Tensor(Site(f"{name}.{part}", Kind.OUTPUT), (*tokens, out), units)


def _linear(name: str, block: int, tokens: Shape, weight: tuple[int, int]) -> Iterator[Tensor]:
    return _module(name, block, weight=weight, reads=(*tokens, weight[1]), makes=(*tokens, weight[0]))


def _module(name: str, block: int, *, weight: Shape = (), reads: Shape, makes: Shape) -> Iterator[Tensor]:
    units = (("pp", block),)
    if weight:
        yield Tensor(Site(f"{name}.weight", Kind.PARAM), weight, units)
    yield Tensor(Site(name, Kind.INPUT), reads, units)
    yield Tensor(Site(name, Kind.OUTPUT), makes, units)


def holdings(model: Model, mesh: Mesh) -> Holdings:
    """Stages hold runs of blocks, expert-parallel ranks runs of experts, as even as may be."""
    return {
        "pp": _runs(model.num_layers + 2, mesh.sizes["pp"]),
        "ep": _runs(model.num_experts, mesh.sizes["ep"]),
    }


def _runs(num_units: int, world: int) -> list[range]:
    bounds = [num_units * index // world for index in range(world + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


@dataclass
class Division:
    """Tensors with their layouts on a mesh: decided once, then proved, or listed for any rank."""

    mesh: Mesh
    rules: Rules
    held: Holdings
    tensors: list[Tensor]
    layouts: list[Layout | None] = field(init=False)

    def __post_init__(self) -> None:
        self.rules.check(self.mesh)
        rules = [self.rules.decide(tensor.site) for tensor in self.tensors]
        self.layouts = [rule.layout if rule else None for rule in rules]

    @property
    def num_layouts(self) -> int:
        """Distinct pairs of a layout and a shape: the number of proofs."""
        return len({(layout, tensor.shape) for tensor, layout in zip(self.tensors, self.layouts, strict=True)})

    def prove(self) -> list[str]:
        """What is wrong with the division, one line per tensor; nothing is wrong with a proved one."""
        untiled: dict[tuple[Layout, Shape, frozenset[str]], str] = {}
        owners = self._owners()
        faults = []
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            for axis, unit in tensor.units:
                if owners[axis][unit] != 1:
                    faults.append(f"{tensor.site}: {owners[axis][unit]} indices of axis {axis} hold it")
            if layout is None:
                faults.append(f"{tensor.site}: no rule gives it a layout")
                continue
            key = (layout, tensor.shape, frozenset(axis for axis, _ in tensor.units))
            if key not in untiled:
                untiled[key] = self._untiled(*key)
            if untiled[key]:
                faults.append(f"{tensor.site}: {untiled[key]}")
        return faults

    def _owners(self) -> dict[str, Counter[int]]:
        """Per axis, how many of the indices that the mesh really has hold each unit."""
        existing = {axis: held[: self.mesh.sizes[axis]] for axis, held in self.held.items()}
        return {axis: Counter(unit for units in held for unit in units) for axis, held in existing.items()}

    def _untiled(self, layout: Layout, shape: Shape, owning: frozenset[str]) -> str:
        """Why this layout does not tile this shape among the ranks that own the tensor, or nothing."""
        if layout.axes & owning:
            axes = ", ".join(sorted(layout.axes & owning))
            return f"{layout} cuts it along {axes}, which already tells its owner"
        try:
            self.mesh.check_one_factorisation(layout.axes | owning)
            found = layout.coverage(shape, self.mesh.sizes)
        except LayoutError as error:
            return str(error)
        if found.is_tiling:
            return ""
        return (
            f"{layout} loses {found.num_gap} elements (first {found.first_gap}) "
            f"and holds {found.num_overlap} twice (first {found.first_overlap})"
        )

    def regions(self, coord: Coord) -> dict[Site, Region]:
        """All that one rank holds."""
        sizes = self.mesh.sizes
        return {
            tensor.site: layout.region(tensor.shape, sizes, coord)
            for tensor, layout in zip(self.tensors, self.layouts, strict=True)
            if layout is not None and all(unit in self.held[axis][coord[axis]] for axis, unit in tensor.units)
        }


def measure(text: str, model: Model) -> tuple[Division, float, list[float]]:
    """Divide, prove, and list what three ranks hold; in seconds."""
    start = time.perf_counter()
    mesh = Mesh.parse(text)
    division = Division(mesh, Rules.of(RULES), holdings(model, mesh), list(tensors(model)))
    faults = division.prove()
    proved = time.perf_counter() - start
    if faults:
        raise SystemExit("\n".join(["the layout is not proved:", *faults[:20]]))
    lists = []
    for rank in (0, mesh.num_ranks // 2 + 1, mesh.num_ranks - 1):
        start = time.perf_counter()
        held = division.regions(mesh.coord(rank))
        lists.append(time.perf_counter() - start)
        assert held, f"rank {rank} holds nothing"
    return division, proved, lists


def main() -> int:
    print(f"{'ranks':>7} {'tensors':>9} {'layouts':>9} {'proof s':>9}   rank lists s")
    proved, lists = 0.0, [0.0]
    for text in MESHES:
        division, proved, lists = measure(text, Model())
        counts = (division.mesh.num_ranks, len(division.tensors), division.num_layouts)
        print("{:>7} {:>9} {:>9}".format(*counts), f"{proved:>9.1f}  ", *(f"{each:.2f}" for each in lists))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"layout: {proved:.1f} s, {gib:.2f} GiB, rank list {max(lists):.2f} s "
        f"(bars {SECONDS:.0f} s, {GIB:.0f} GiB, {LIST_SECONDS:.0f} s)"
    )
    return int(proved > SECONDS or gib > GIB or max(lists) > LIST_SECONDS)
