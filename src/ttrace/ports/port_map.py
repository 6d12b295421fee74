"""Maps between two implementations of a model: which names correspond, and how tensors are joined, ordered and padded.

[names]                                     # the reference's modules and parameters = the candidate's; * is one word
"model.layers.*.mlp.down_proj" = "decoder.layers.*.mlp.linear_fc2"

[slots]                                     # inputs and outputs of a module, by the candidate's name = the slot there
"decoder.layers.*/output" = "0"

[dims]                                      # the order of dims in a module and all inside it
"decoder" = "batch seq ... -> seq batch ..."

[[join]]                                    # modules or parameters that are one on the other side
parts = ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"]
whole = "decoder.layers.*.mlp.linear_fc1"

[ignore]                                    # sites that only one side has; ** is any number of words
reference = ["**.act_fn"]
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ttrace.errors import TTraceError
from ttrace.files import read_settings
from ttrace.ports.dim_order import DimOrder
from ttrace.untrusted import parse_toml

_SHIPPED = resources.files("ttrace.ports") / "maps"


class Join(BaseModel):
    """Modules or parameters of one side that are parts of one tensor of the other side, in this order.

    A `#` in the name of a part is its number in the whole, which then has one dim more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: tuple[str, ...] = Field(min_length=1)
    whole: str
    """The name of the whole, in the candidate's names."""
    side: Literal["reference", "candidate"] = "reference"
    """The side that has the parts."""
    groups: int | str = 1
    """The whole has this many groups, and each has its share of every part; a text is a number of the model's config,
    or two divided by each other."""
    rotary: tuple[int | str, ...] = ()
    """For each part, the size of the heads whose halves, which are rotated into each other, become neighbours; 0 for a
    part that is not rotated. Empty if none is."""

    @model_validator(mode="after")
    def _check_rotary(self) -> Join:
        if self.rotary and len(self.rotary) != len(self.parts):
            raise ValueError(f"rotary of {self.whole} needs a size for each of its {len(self.parts)} parts")
        return self


class IgnoredSites(BaseModel):
    """Sites that only one side has, or that mean something else on the other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()


class PortMap(BaseModel):
    """What corresponds in two implementations of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: dict[str, str] = {}
    slots: dict[str, str] = {}
    dims: dict[str, str] = {}
    join: tuple[Join, ...] = ()
    padded: tuple[str, ...] = ()
    """The candidate's modules and parameters whose rows are padded there, as those of a vocabulary."""
    ignore: IgnoredSites = IgnoredSites()

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: dict[str, str]) -> dict[str, str]:
        for order in dims.values():
            DimOrder.parse(order)
        return dims

    @classmethod
    def load(cls, given: str) -> PortMap:
        """Read a map from a file, or one of those that TTrace brings by its name."""
        path = Path(given)
        try:
            if given in list_shipped():
                text = (_SHIPPED / f"{given}.toml").read_text(encoding="utf-8")
            else:
                text = read_settings(path)
            found = cls.model_validate(parse_toml(text, given))
            if not found.names and not found.join:
                raise TTraceError(f"{given} maps nothing: it needs a table [names] or [[join]].")
            return found
        except FileNotFoundError:
            raise TTraceError(
                f"there is no map {given}. Give the path of a TOML file, or one of {', '.join(list_shipped())}."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise TTraceError(f"{given} is no map: {error}") from None


@cache
def list_shipped() -> tuple[str, ...]:
    """List the names of the maps that TTrace brings."""
    names = (each.name for each in _SHIPPED.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))
