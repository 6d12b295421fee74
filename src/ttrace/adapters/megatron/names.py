"""Names of what lies in a chunk, as the whole model has them: with global layer and expert numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ttrace.adapters.wrappers import find_canonical_name, find_wrapper_levels
from ttrace.layouts.ids import ROOT, encode_name

TIED = ("output_layer.weight", "embedding.word_embeddings.weight")
"""The last stage's copy of a tied embedding, and the embedding itself."""

_GROUPED = re.compile(r"(?P<module>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>\d+)")
"""Weights of experts that one grouped module holds, each with a number of its own."""


class ChunkNames:
    """The canonical names of one chunk."""

    def __init__(self, chunk: nn.Module, expert_rank: int) -> None:
        self._chunk = chunk
        self._expert_rank = expert_rank
        self._numbers = dict(_number_members(chunk, expert_rank))
        self._num_local = {
            find_canonical_name(p, chunk): m.num_local_experts for p, m in chunk.named_modules() if _has_experts(m)
        }
        self._copies_embedding = any(map(_copies_embedding, chunk.modules()))
        self.divided = frozenset(
            {
                ROOT,
                *(
                    find_canonical_name(path.rpartition(".layers.")[0], chunk)
                    for path in self._numbers
                    if ".layers." in path
                ),
            }
        )
        """The modules of which each stage has a part: those that hold the layers."""

    def name(self, path: str) -> str:
        parts, wrappers = path.split("."), find_wrapper_levels(path, self._chunk)
        numbered = (self._numbers.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts))
        name = encode_name(".".join(part for i, part in enumerate(numbered) if i not in wrappers)) or ROOT
        if self._copies_embedding and name == TIED[0]:
            return TIED[1]
        match = _GROUPED.fullmatch(name)
        if match:
            experts = match["module"].rpartition(".experts.")[0] + ".experts"
            return f"{match['module']}{int(match['number']) + self._expert_rank * self._num_local.get(experts, 0)}"
        return name


def _number_members(chunk: nn.Module, expert_rank: int) -> Iterator[tuple[str, str]]:
    """Yield each layer and expert of this chunk by path, with its number in the whole model."""
    for path, module in chunk.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            for i, layer in enumerate(module.layers):
                number = getattr(layer, "layer_number", None)
                if isinstance(number, int):
                    yield f"{path}.layers.{i}", str(number - 1)
        if isinstance(getattr(module, "local_experts", None), nn.ModuleList):
            first = expert_rank * len(module.local_experts)
            for i in range(len(module.local_experts)):
                yield f"{path}.local_experts.{i}", str(first + i)


def _copies_embedding(module: nn.Module) -> bool:
    """Whether this is the last part of a model, and uses the embedding of the first part."""
    is_tied = getattr(module, "share_embeddings_and_output_weights", False)
    return bool(is_tied and getattr(module, "post_process", False) and not getattr(module, "pre_process", True))


def _has_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "num_local_experts", None), int)
