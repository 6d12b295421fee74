"""Suggestion of a map between two implementations, from the names and shapes of one step of each.

`Sites` collects the sites of a traced step, with the numbers of layers replaced by `*`, as maps name them. Modules are
paired by their roles: common names for the same part of a transformer, such as `self_attn` and `self_attention`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ttrace.errors import TTraceError
from ttrace.layouts.ids import ROOT, Kind, drop_layers
from ttrace.layouts.region import Shape
from ttrace.ports.port_map import ANY, NUMBER, IgnoredSites, Join, PortMap, rename
from ttrace.trace.reader import Trace

_ORDER = "batch seq ... -> seq batch ..."
_MERGED = "(batch seq) ... -> (seq batch) ..."
_GROUPED = ("linear_qkv", "wqkv")
"""Modules with queries, keys and values in groups; others have all queries first."""
ACTIVATIONS = (Kind.INPUT, Kind.OUTPUT, Kind.DECISION)
_WORDS = {
    "embedding": "embedding embed_tokens word_embeddings tok_embeddings wte",
    "attention": "self_attn self_attention attn",
    "feed forward": "mlp feed_forward ffn",
    "first norm": "input_layernorm attention_norm ln_1",
    "second norm": "post_attention_layernorm pre_mlp_layernorm ffn_norm ln_2",
    "last norm": "norm final_layernorm ln_f",
    "head": "lm_head output_layer",
    "query": "q_proj wq",
    "key": "k_proj wk",
    "value": "v_proj wv",
    "query key value": "linear_qkv wqkv qkv_proj",
    "query norm": "q_norm q_a_layernorm q_layernorm",
    "key norm": "k_norm k_layernorm",
    "latent norm": "kv_a_layernorm kv_layernorm",
    "query down": "q_a_proj linear_q_down_proj",
    "query up": "q_b_proj linear_q_up_proj",
    "latent down": "kv_a_proj_with_mqa linear_kv_down_proj",
    "latent up": "kv_b_proj linear_kv_up_proj",
    "attention output": "o_proj linear_proj wo",
    "gate": "gate_proj w1",
    "up": "up_proj w3",
    "gate up": "linear_fc1 gate_up_proj",
    "down": "down_proj linear_fc2 w2",
    "router": "gate router",
    "routing bias": "e_score_correction_bias expert_bias",
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words.split()}
JOINED = {"query key value": ("query", "key", "value"), "gate up": ("gate", "up")}
"""Roles of joined modules, with the roles of the modules that may replace them."""
_CONTAINERS = ("model", "decoder", "transformer", "encoder", "qkv_linear", "local_experts")
"""Modules that only contain others."""


def suggest_map(reference: Trace, candidate: Trace) -> PortMap:
    """Suggest a map. Sites that names and shapes do not determine are listed under [ignore]."""
    return _Suggestion(Sites.read(reference), Sites.read(candidate)).make()


@dataclass
class Sites:
    """The modules, parameters and buffers of a run by pattern, each with the shapes of one layer."""

    modules: dict[str, dict[Kind, dict[str, Shape]]] = field(default_factory=dict)
    """For each module, the shapes by kind and slot."""
    parameters: dict[str, Shape] = field(default_factory=dict)
    buffers: dict[str, Shape] = field(default_factory=dict)
    numbers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The last numbers in each parameter's name, such as those of experts."""
    kinds: set[Kind] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    """The buffers that the step changes."""

    @classmethod
    def read(cls, trace: Trace) -> Sites:
        """Read the sites of the first step's first microbatch."""
        sites = cls()
        for tensor_id, shards in trace.shards.items():
            region = shards[0].record.region
            shape = shards[0].record.shape if region is None else region.shape
            pattern, kind, slot = drop_layers(tensor_id.name), tensor_id.kind, tensor_id.site.slot
            if tensor_id.step or tensor_id.microbatch not in (0, None):
                continue
            sites.kinds.add(kind)
            if kind is Kind.PARAM:
                sites.parameters.setdefault(pattern, shape)
                sites.numbers[pattern] |= {word for word in tensor_id.name.split(".")[-3:] if word.isdecimal()}
            elif kind is Kind.BUFFER:
                sites.buffers.setdefault(pattern, shape)
                after = trace.shards.get(tensor_id.at(Kind.BUFFER_AFTER))
                if after is not None and not shards[0].tensor().equal(after[0].tensor()):
                    sites.changed.add(pattern)
            elif kind in ACTIVATIONS and not slot.endswith("scores"):
                sites.modules.setdefault(pattern, {}).setdefault(kind, {}).setdefault(slot, shape)
        return sites

    @property
    def around_layers(self) -> str:
        """The module that contains the layers."""
        layers = (pattern for pattern in self.modules if pattern.split(".")[-1:] == ["*"])
        first = min(layers, key=len, default="")
        return ".".join(first.split(".")[:-2]) or ROOT


def find_roles(name: str) -> tuple[str, ...]:
    """Return the roles of all components of a name; an unknown component is its own role."""
    roles = [_ROLES.get(word, word) for word in name.split(".") if word not in _CONTAINERS]
    return tuple(
        role for place, role in enumerate(roles) if role == ANY or role not in roles[max(place - 1, 0) : place]
    )


def list_parts(roles: Sequence[str]) -> list[tuple[str, ...]]:
    """List the roles of the modules that are joined in a module with these roles; empty if it is not joined."""
    for place, role in enumerate(roles):
        if role in JOINED:
            return [(*roles[:place], part, *roles[place + 1 :]) for part in JOINED[role]]
    return []


@dataclass
class _Suggestion:
    ours: Sites
    theirs: Sites
    names: dict[str, str] = field(default_factory=dict)
    slots: dict[str, str] = field(default_factory=dict)
    dims: dict[str, str] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)
    """The sites with the same order of dims on both sides."""
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
        """Join modules of ours that are one module of theirs; return the whole of each and of its parameters."""
        wholes: dict[str, str] = {}
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
                wholes |= {name: whole, member: module}
                if f"{member}.bias" in self.ours.parameters and f"{module}.bias" in self.theirs.parameters:
                    wholes[f"{member}.bias"] = f"{module}.bias"
        return wholes

    def _join_experts(self, pairs: dict[str, str]) -> set[str]:
        """Pair one tensor of all experts with the tensors of single experts; return the latter."""
        single_experts = set()
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
                    single_experts.add(other)
        return single_experts

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
        missing = [name for name in self.ours.parameters if name not in pairs and name not in joined]
        known = {*pairs.values(), *joined.values(), *stacked}
        extra = [name for name in self.theirs.parameters if name not in known]
        if missing or extra:
            raise TTraceError(
                f"names and shapes do not pair these parameters of the reference: {', '.join(missing) or 'none'}; nor "
                f"these of the candidate: {', '.join(extra) or 'none'}. Write the map by hand, starting from one of "
                "those that `ttrace map` lists."
            )

    # Modules

    def _pair_modules(self, joined: Mapping[str, str]) -> dict[str, str]:
        """Pair modules of the same roles; if nested modules have them, use the outer one."""
        theirs = _by_roles(sorted(self.theirs.modules, key=len))
        pairs = {}
        for name in self.ours.modules:
            others = theirs.get(find_roles(name), ())
            if others and name not in joined and name != ROOT:
                pairs[name] = others[0]
        around = self.ours.around_layers, self.theirs.around_layers
        if ROOT not in around:
            pairs[around[0]] = around[1]
        if ROOT in self.ours.modules and ROOT in self.theirs.modules:
            pairs[ROOT] = ROOT
        return pairs

    def _pair_slots(self, ours: str, theirs: str, *, is_part: bool) -> None:
        """Pair the inputs and outputs of two modules by shape."""
        both = self.ours.modules.get(ours, {}), self.theirs.modules.get(theirs, {})
        is_router = any(Kind.DECISION in each for each in both)
        if is_router:  # the outputs of routers depend on the code around them
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
                    self.slots[f"{theirs}/{kind}.{slot}".rstrip(".")] = named
                if order:
                    self.dims[f"{theirs}/{kind}"] = order
                else:
                    self.alike.append(f"{theirs}/{kind}")
            if not is_part:
                for slot in left:
                    self._ignore(1, theirs, kind, slot)

    def _find_order(self, shape: Shape, other: Shape, kind: Kind, *, is_part: bool) -> str | None:
        """Find the order of dims that makes two shapes equal; empty if they are equal, None if there is none."""
        compared = slice(None, -1) if is_part else slice(None)
        if shape[compared] == other[compared]:
            if kind is Kind.DECISION and self._is_transposed:
                return _MERGED
            return ""
        if len(shape) == len(other) >= 2 and (shape[1], shape[0], *shape[2:])[compared] == other[compared]:
            return _ORDER
        return None

    def _shorten_dims(self) -> dict[str, str]:
        """State the order once for each outermost module in which all sites have the same."""
        dims: dict[str, str] = {}
        for site, order in self.dims.items():
            outermost = site.partition("/")[0].partition(".")[0]
            is_mixed = any(other.partition("/")[0].partition(".")[0] == outermost for other in self.alike)
            dims[site if is_mixed or order != _ORDER else outermost] = order
        return dims

    @property
    def _is_transposed(self) -> bool:
        return _ORDER in self.dims.values()

    def _ignore_modules(self, ours: set[str], theirs: set[str]) -> None:
        """Ignore modules without a counterpart, and kinds that only one side has."""
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
    by_roles: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_roles.setdefault(find_roles(name), []).append(name)
    return by_roles


def _is_padded(shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and shape[1:] == other[1:] and shape[:1] < other[:1]
