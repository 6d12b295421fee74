"""Several models that a script trains in one step, as one module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from torch import nn

from ttrace.adapters.wrappers import find_wrapped


class JoinedModels(nn.Module):
    """A module that holds several models under names of their classes. It is never called itself."""


def join_models(models: Sequence[nn.Module]) -> nn.Module:
    """Return the only model, or a module that holds all of them."""
    if len(models) == 1:
        return models[0]
    joined, counts = JoinedModels(), Counter[str]()
    for model in models:
        name = _name_class(model)
        counts[name] += 1
        joined.add_module(name if counts[name] == 1 else f"{name}_{counts[name]}", model)
    return joined


def _name_class(model: nn.Module) -> str:
    """Return the name of a model's class as that of an attribute, without what wraps the model."""
    if (inner := find_wrapped(model)) is not None:
        return _name_class(inner)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower()
