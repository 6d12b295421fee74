"""Suggestion of a map between two implementations, from the names and shapes of a step of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ttrace.errors import TTraceError
from ttrace.layouts.ids import ROOT, Kind
from ttrace.layouts.region import Shape
from ttrace.ports.name_pattern import ANY, NUMBER, rename
from ttrace.ports.port_map import IgnoredSites, Join, PortMap
from ttrace.ports.roles import find_roles, list_parts
from ttrace.ports.sites import ACTIVATIONS, Sites
from ttrace.trace.reader import Trace

_ORDER = "batch seq ... -> seq batch ..."
_MERGED = "(batch seq) ... -> (seq batch) ..."
_GROUPED = ("linear_qkv", "wqkv")
"""Modules that have queries, keys and values by group; others have all queries first."""


def suggest_map(reference: Trace, candidate: Trace) -> PortMap:
    """Suggest what corresponds; what no name and shape decides is ignored, and listed there."""
    return _Suggestion(Sites.read(reference), Sites.read(candidate)).make()


@dataclass
class _Suggestion:
    ours: Sites
    theirs: Sites
    names: dict[str, str] = field(default_factory=dict)
    slots: dict[str, str] = field(default_factory=dict)
    dims: dict[str, str] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)
    """What has the same dims on both sides."""
    joins: list[Join] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    ignored: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def make(self) -> PortMap:
        pairs = dict(self._pair_parameters())
        joined = self._join_parts(pairs)
        stacked = self._join_experts(pairs)
        modules = self._pair_modules(joined)
        for ours, theirs in sorted({**modules, **pairs}.items(), key=lambda pair: pair[0].count(".")):
            if (rename(self.names, ours) or ours) != theirs and ours not in joined:
                self.names[ours] = theirs
        self._pair_buffers()
        self._check_parameters(pairs, joined, stacked)
        for ours, theirs in {**modules, **joined}.items():
            if ours in self.ours.modules:
                self._pair_slots(ours, theirs, is_part=ours in joined)
        self._ignore_modules({*modules, *joined}, {*modules.values(), *joined.values()})
        return PortMap(
            names=self.names,
            slots=self.slots,
            dims=self._shorten_dims(),
            join=tuple(self.joins),
            padded=tuple(self.padded),
            ignore=IgnoredSites(reference=tuple(self.ignored[0]), candidate=tuple(self.ignored[1])),
        )

    # Parameters

    def _pair_parameters(self) -> Iterator[tuple[str, str]]:
        """Pair parameters of the same role and shape; a vocabulary may be padded."""
        theirs = _by_roles(self.theirs.parameters)
        for name, shape in self.ours.parameters.items():
            for other in theirs.get(find_roles(name), ()):
                if self.theirs.parameters[other] == shape:
                    yield name, other
                elif _is_padded(shape, self.theirs.parameters[other]):
                    self.padded.append(other)
                    yield name, other

    def _join_parts(self, pairs: Mapping[str, str]) -> dict[str, str]:
        """Join modules of ours that are one of theirs; return the whole of each, and of its parameters."""
        found: dict[str, str] = {}
        ours = _by_roles(self.ours.parameters)
        for whole, shape in self.theirs.parameters.items():
            parts = [name for roles in list_parts(find_roles(whole)) for name in ours.get(roles, ())]
            if whole in pairs.values() or len(parts) < 2 or not whole.endswith(".weight"):
                continue
            shapes = [self.ours.parameters[name] for name in parts]
            if sum(each[0] for each in shapes) != shape[0] or {each[1:] for each in shapes} != {shape[1:]}:
                continue
            module = whole.rpartition(".")[0]
            members = [name.rpartition(".")[0] for name in parts]
            is_grouped = module.rpartition(".")[2] in _GROUPED
            self.joins.append(
                Join(parts=tuple(members), whole=module, groups="num_key_value_heads" if is_grouped else 1)
            )
            for name, member in zip(parts, members, strict=True):
                found |= {name: whole, member: module}
                if f"{member}.bias" in self.ours.parameters and f"{module}.bias" in self.theirs.parameters:
                    found[f"{member}.bias"] = f"{module}.bias"
        return found

    def _join_experts(self, pairs: dict[str, str]) -> set[str]:
        """Pair one tensor of all experts with the tensors of each of them; return theirs."""
        found = set()
        for name, shape in self.ours.parameters.items():
            for other, part in self.theirs.parameters.items():
                words = other.split(".")
                last = len(words) - 1 - words[::-1].index(ANY) if ANY in words else 0
                roles = tuple(
                    role for role in find_roles(".".join([*words[:last], *words[last + 1 :]])) if role != "weight"
                )
                if roles == find_roles(name) and shape == (len(self.theirs.numbers[other]), *part):
                    whole = ".".join(word for place, word in enumerate(words) if place not in (last - 1, last))
                    numbered = ".".join([*words[:last], NUMBER, *words[last + 1 :]])
                    self.joins.append(Join(side="candidate", parts=(numbered,), whole=whole))
                    pairs[name] = whole
                    found.add(other)
        return found

    def _pair_buffers(self) -> None:
        theirs = _by_roles(self.theirs.buffers)
        paired = set()
        for name, shape in self.ours.buffers.items():
            same = [other for other in theirs.get(find_roles(name), ()) if self.theirs.buffers[other] == shape]
            if same:
                paired.add(same[0])
                if (name in self.ours.changed) != (same[0] in self.theirs.changed):
                    self.ignored[0].append(f"{name}/{Kind.BUFFER_AFTER}")
                    self.ignored[1].append(f"{same[0]}/{Kind.BUFFER_AFTER}")
                if (rename(self.names, name) or name) != same[0]:
                    self.names[name] = same[0]
            else:
                self.ignored[0].append(name)
        self.ignored[1].extend(name for name in self.theirs.buffers if name not in paired)

    def _check_parameters(self, pairs: Mapping[str, str], joined: Mapping[str, str], stacked: set[str]) -> None:
        lacking = [name for name in self.ours.parameters if name not in pairs and name not in joined]
        known = {*pairs.values(), *joined.values(), *stacked}
        extra = [name for name in self.theirs.parameters if name not in known]
        if lacking or extra:
            raise TTraceError(
                f"names and shapes do not pair these parameters of the reference: {', '.join(lacking) or 'none'}; nor "
                f"these of the candidate: {', '.join(extra) or 'none'}. Write the map by hand, beginning with one of "
                "those that `ttrace map` lists."
            )

    # Modules

    def _pair_modules(self, joined: Mapping[str, str]) -> dict[str, str]:
        """Pair the modules of the same role; where an inner module has it too, the outer one."""
        theirs = _by_roles(sorted(self.theirs.modules, key=len))
        found = {}
        for name in self.ours.modules:
            others = theirs.get(find_roles(name), ())
            if others and name not in joined and name != ROOT:
                found[name] = others[0]
        around = self.ours.around_layers, self.theirs.around_layers
        if ROOT not in around:
            found[around[0]] = around[1]
        if ROOT in self.ours.modules and ROOT in self.theirs.modules:
            found[ROOT] = ROOT
        return found

    def _pair_slots(self, ours: str, theirs: str, *, is_part: bool) -> None:
        """Pair the inputs and outputs of two modules by shape."""
        both = self.ours.modules.get(ours, {}), self.theirs.modules.get(theirs, {})
        is_router = any(Kind.DECISION in each for each in both)
        if is_router:  # each returns what suits the code after it
            self.ignored[0].append(f"{ours}/*put*")
            self.ignored[1].append(f"{theirs}/*put*")
        for kind in (Kind.DECISION,) if is_router else ACTIVATIONS:
            mine, others = (each.get(kind, {}) for each in both)
            cuts = is_part and kind is Kind.OUTPUT
            left = dict(others)
            for slot, shape in mine.items():
                orders = {key: self._find_order(shape, other, kind, is_part=cuts) for key, other in left.items()}
                fits = {key: order for key, order in orders.items() if order is not None}
                named = slot if slot in fits else next(iter(fits), None)
                if named is None:
                    self._ignore(0, ours, kind, slot)
                    continue
                order = fits[named]
                del left[named]
                if named != slot:
                    self.slots[_format_site(theirs, kind, slot)] = named
                if order:
                    self.dims[f"{theirs}/{kind}"] = order
                else:
                    self.alike.append(f"{theirs}/{kind}")
            if not is_part:
                for slot in left:
                    self._ignore(1, theirs, kind, slot)

    def _find_order(self, shape: Shape, other: Shape, kind: Kind, *, is_part: bool) -> str | None:
        """Find the order of dims that makes two shapes one; None if there is none, empty if they are the same."""
        kept = slice(None, -1) if is_part else slice(None)
        if shape[kept] == other[kept]:
            if kind is Kind.DECISION and self._is_transposed:
                return _MERGED
            return ""
        if len(shape) == len(other) >= 2 and (shape[1], shape[0], *shape[2:])[kept] == other[kept]:
            return _ORDER
        return None

    def _shorten_dims(self) -> dict[str, str]:
        """State the order once for each outermost module in which nothing has another one."""
        found: dict[str, str] = {}
        for site, order in self.dims.items():
            outermost = site.partition("/")[0].partition(".")[0]
            is_mixed = any(other.partition("/")[0].partition(".")[0] == outermost for other in self.alike)
            found[site if is_mixed or order != _ORDER else outermost] = order
        return found

    @property
    def _is_transposed(self) -> bool:
        return _ORDER in self.dims.values()

    def _ignore_modules(self, ours: set[str], theirs: set[str]) -> None:
        """Ignore what no module of the other side corresponds to."""
        for side, (sites, known) in enumerate(((self.ours, ours), (self.theirs, theirs))):
            for name in sites.modules:
                if name not in known:
                    self.ignored[side].append(f"{name}/*put*")
            if Kind.DECISION in sites.kinds:
                self.ignored[side].append("**/decision.*scores")
        for side, (mine, other) in enumerate(((self.ours, self.theirs), (self.theirs, self.ours))):
            self.ignored[side].extend(f"**/{kind}" for kind in sorted(mine.kinds - other.kinds))

    def _ignore(self, side: int, name: str, kind: Kind, slot: str) -> None:
        with_gradient = "" if kind is Kind.DECISION else ANY
        self.ignored[side].append(f"{name}/{with_gradient}{kind}.{slot}")


def _by_roles(names: Sequence[str] | Mapping[str, Shape]) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found.setdefault(find_roles(name), []).append(name)
    return found


def _is_padded(shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and shape[1:] == other[1:] and shape[:1] < other[:1]


def _format_site(name: str, kind: Kind | str, slot: str) -> str:
    return f"{name}/{kind}.{slot}".rstrip(".")
