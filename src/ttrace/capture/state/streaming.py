"""Limits of a streamed model: what cannot be traced, and what is run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ttrace.large_references.parameter_source import find_source
from ttrace.layouts.ids import Kind

_UNTRACED = (Kind.UPDATE, Kind.PARAM_AFTER, Kind.OPTIM, Kind.GRAD_NORM, Kind.CLIP, Kind.MAIN_GRAD)
"""Kinds that need all gradients at once, or memory for each parameter."""


@dataclass(frozen=True)
class Streaming:
    """The limits that follow from the number of streamed parameters."""

    num_streamed: int
    recomputes: bool = False
    """Whether modules run again in backward, only because backward needs their parameters' values."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> Streaming:
        sources = [source for parameter in parameters if (source := find_source(parameter)) is not None]
        return cls(len(sources), any(source.recomputes for source in sources))

    @property
    def untraced(self) -> tuple[Kind, ...]:
        return _UNTRACED if self.num_streamed else ()

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.num_streamed:
            return ()
        return (
            f"{self.num_streamed} parameters are streamed: there is no optimizer's state, so that updates and the norm "
            "of all gradients are not traced",
        )
