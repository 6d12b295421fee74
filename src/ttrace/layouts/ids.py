"""Ids of tensors: the same logical tensor has the same id in every run.

The text form is `step/mb/name[@call]/kind[.slot]`, with `-` for no microbatch and `.` for the model itself:
`0/2/layers.3.mlp.fc1/output`, `0/-/lm_head.weight/param_grad`, `0/0/./loss`. Characters that would break this form are
percent-encoded in names and slots wherever they are written: a module called `a/b` is `a%2Fb`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from ttrace.errors import TTraceError
from ttrace.untrusted import HIDDEN

ROOT = "."
"""The name of the model itself, whose own path is empty."""
LABELS = "labels"
"""The name of labels that the script keeps and that do not pass through the model."""
MAIN_PARAM = "main_param"
"""The slot of the higher-precision copy of a parameter that the optimizer updates."""
STEP = "step"
"""The slot of the optimizer's number of steps."""


class Phase(StrEnum):
    """The part of a step in which a tensor is made, or a collective runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Only of collectives: tensors that are recomputed count as backward, as they are made while it runs."""
    OPTIMIZER = "optimizer"
    OTHER = "other"
    """Only of collectives, between the others: clipping, for instance, and the script's own code."""


class Kind(StrEnum):
    """The kind of a tensor: its relation to the module or parameter that it is named after."""

    BATCH = "batch"
    INPUT = "input"
    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_OUTPUT = "grad_output"
    PARAM = "param"
    PARAM_GRAD = "param_grad"
    MAIN_GRAD = "main_grad"
    UPDATE = "update"
    PARAM_AFTER = "param_after"
    OPTIM = "optim"
    BUFFER = "buffer"
    BUFFER_AFTER = "buffer_after"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    CLIP = "clip"
    DECISION = "decision"
    CALL = "call"
    CALL_GRAD = "call_grad"
    RECOMPUTE_INPUT = "recompute_input"
    RECOMPUTE_OUTPUT = "recompute_output"

    __hash__ = str.__hash__
    """Enum's own hash is written in Python and slower, and ids are keys of many dicts."""

    @property
    def is_activation_grad(self) -> bool:
        return self in _OF_ACTIVATION_GRAD

    @property
    def is_of_call(self) -> bool:
        """Whether this belongs to an operation inside a module: it is evidence, and is not judged."""
        return self in _OF_CALL

    @property
    def phase(self) -> Phase:
        """The part of a step in which tensors of this kind are made; forward if no operation of the step makes them."""
        return _PHASES[self]

    @property
    def is_backward(self) -> bool:
        return _PHASES[self] is Phase.BACKWARD

    @property
    def is_recompute(self) -> bool:
        return self in _RECOMPUTE

    @property
    def is_of_param(self) -> bool:
        return self in _OF_PARAM

    @property
    def is_of_buffer(self) -> bool:
        return self in _OF_BUFFER

    @property
    def primal(self) -> Kind:
        """The kind whose layout this kind has if no layout is stated for it."""
        return _PRIMAL.get(self, self)


# Sets that are made once, because the properties are read several times for every tensor.
_OF_ACTIVATION_GRAD = frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.CALL_GRAD})
_OF_CALL = frozenset({Kind.CALL, Kind.CALL_GRAD})
_RECOMPUTE = frozenset({Kind.RECOMPUTE_INPUT, Kind.RECOMPUTE_OUTPUT})
_PHASES = {
    **dict.fromkeys(Kind, Phase.FORWARD),
    **dict.fromkeys(_OF_ACTIVATION_GRAD | _RECOMPUTE | {Kind.PARAM_GRAD, Kind.MAIN_GRAD}, Phase.BACKWARD),
    **dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM), Phase.OPTIMIZER),
}
_OF_BUFFER = frozenset({Kind.BUFFER, Kind.BUFFER_AFTER})
_OF_PARAM = frozenset({Kind.PARAM, Kind.PARAM_GRAD, Kind.MAIN_GRAD, Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM})
_KINDS = {kind.value: kind for kind in Kind}
_PRIMAL = {
    Kind.GRAD_INPUT: Kind.INPUT,
    Kind.GRAD_OUTPUT: Kind.OUTPUT,
    Kind.CALL_GRAD: Kind.CALL,
    Kind.RECOMPUTE_INPUT: Kind.INPUT,
    Kind.RECOMPUTE_OUTPUT: Kind.OUTPUT,
    Kind.BUFFER_AFTER: Kind.BUFFER,
    **dict.fromkeys(_OF_PARAM, Kind.PARAM),
}


def is_inside(inner: str, outer: str) -> bool:
    """Return whether a module or parameter is `outer` or is inside it."""
    return outer in (ROOT, inner) or inner.startswith(f"{outer}.")


def list_around(name: str) -> list[str]:
    """List a module and all modules that contain it; the model comes last."""
    parts = name.split(".") if name != ROOT else []
    return [*(".".join(parts[:count]) for count in range(len(parts), 0, -1)), ROOT]


@lru_cache(maxsize=1 << 17)
def drop_numbers(name: str) -> str:
    """Replace the numbers in a name by `#`, so that modules of different layers or experts have the same name."""
    return re.sub(r"\d+", "#", name)


def drop_layers(name: str) -> str:
    """Replace path components that are numbers by `*`; digits inside other components, such as fc1, stay."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def encode_name(text: str) -> str:
    """Percent-encode a module's own name or a key for use in names and slots; different texts stay different."""
    return _UNSAFE.sub(lambda match: quote(match[0], safe="", errors="surrogatepass"), text)


def make_scores_slot(slot: str) -> str:
    """Make the slot of the scores that a decision (such as the choice of experts) was based on."""
    return f"{slot}.scores"


_UNSAFE = re.compile(rf"[/@%\s{HIDDEN.pattern[1:-1]}]")
"""Characters with a meaning in ids, and invisible ones: white space, control characters and surrogates."""
_NAME = re.compile(rf"[^/@\s{HIDDEN.pattern[1:-1]}]+")
_TEXT = re.compile(
    r"(?P<step>[0-9]{1,18})/(?P<mb>[0-9]{1,18}|-)/(?P<name>[^/@\s]+)(?:@(?P<call>[0-9]{1,18}))?/(?P<kind>[a-z_]+)(?:\.(?P<slot>[^/@\s]+))?"
)


@lru_cache(maxsize=1 << 17)
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


class _SiteFields(NamedTuple):
    name: str
    kind: Kind
    slot: str = ""


class Site(_SiteFields):
    """A place of a tensor in the model: name of the module or parameter, kind, and slot in a structured value.

    Sites and ids are tuples because they are keys of many dicts, and tuples hash fast; large models need this.
    """

    __slots__ = ()

    def __new__(cls, name: str, kind: Kind, slot: str = "") -> Site:
        if not (_is_name(name) and (not slot or _is_name(slot))):
            raise TTraceError(
                f"{name!r}/{kind}.{slot!r} is not a valid site: in names and slots '/', '@' and white space are "
                f"percent-encoded, and the name of the model itself is {ROOT!r}."
            )
        return super().__new__(cls, name, kind, slot)

    def __str__(self) -> str:
        return f"{self.name}/{self.kind}.{self.slot}" if self.slot else f"{self.name}/{self.kind}"


class TensorId(NamedTuple):
    """A site at a step and a microbatch; `call` counts the calls of one module within one forward pass."""

    step: int
    microbatch: int | None
    site: Site
    call: int = 0

    @classmethod
    def of(cls, step: int, microbatch: int | None, name: str, kind: Kind, *, slot: str = "", call: int = 0) -> TensorId:
        return cls(step, microbatch, Site(name, kind, slot), call)

    @classmethod
    def parse(cls, text: str) -> TensorId:
        match = _TEXT.fullmatch(text)
        if match is None or match["kind"] not in _KINDS:
            raise TTraceError(
                f"{text[:200]!r} is not a tensor id. Write step/microbatch/name[@call]/kind[.slot], for instance "
                "0/2/layers.3.mlp.fc1/output, with '-' for no microbatch."
            )
        microbatch = None if match["mb"] == "-" else int(match["mb"])
        site = Site(match["name"], _KINDS[match["kind"]], match["slot"] or "")
        return cls(int(match["step"]), microbatch, site, int(match["call"] or 0))

    def __str__(self) -> str:
        site, microbatch = self.site, "-" if self.microbatch is None else self.microbatch
        call = f"@{self.call}" if self.call else ""
        slot = f".{site.slot}" if site.slot else ""
        return f"{self.step}/{microbatch}/{site.name}{call}/{site.kind}{slot}"

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def kind(self) -> Kind:
        return self.site.kind

    @property
    def is_data(self) -> bool:
        """Whether this enters from outside: a batch, or an input of the model itself."""
        return self.kind is Kind.BATCH or (self.kind is Kind.INPUT and self.name == ROOT)

    @property
    def is_of_update(self) -> bool:
        """Whether this is a parameter after the step (the model's or the optimizer's copy) or its update."""
        is_main = self.kind is Kind.OPTIM and self.site.slot == MAIN_PARAM
        return is_main or self.kind in (Kind.UPDATE, Kind.PARAM_AFTER)

    @property
    def first(self) -> TensorId:
        """The id of the tensor in the first forward pass; for a recomputed tensor, the one that it repeats."""
        return self.at(self.kind.primal) if self.kind.is_recompute else self

    def at(self, kind: Kind, slot: str | None = None) -> TensorId:
        """Return the id of another kind with the same name, step, microbatch and call."""
        site = Site(self.site.name, kind, self.site.slot if slot is None else slot)
        return TensorId(self.step, self.microbatch, site, self.call)
