"""Generated data in place of a script's batches."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ttrace.capture.observe.step_counter import StepCounter
from ttrace.capture.observe.structures import flatten_with_paths, is_unknown_mapping, name_slot
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.generator import Generator
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.layouts.ids import LABELS, ROOT, Kind, Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Region
from ttrace.trace.storage.tensor_bytes import view_memory

_Rows = dict[str, tuple[str, ...]]
"""By step and slot, the digest of each row that this rank had."""


class Batches:
    """Generator of batches. It replaces each tensor by this rank's part of generated data, and shows it to probes."""

    def __init__(
        self, clock: StepCounter, resolver: LayoutResolver, generator: Generator, dispatcher: Dispatcher
    ) -> None:
        self._clock = clock
        self._resolver = resolver
        self._generator = generator
        self._dispatcher = dispatcher
        self.kept: _Rows = {}
        self.replaced: _Rows = {}
        """Of data that were replaced, if they were on the host."""

    def generate(self, batch: Any) -> Any:
        """Generate the next batch, with this batch's own structure, shapes, ranges and dtypes."""
        number = self._clock.num_batches
        self._clock.num_batches += 1
        return self.replace(batch, number)

    def compare(self, slot: str, data: torch.Tensor, number: int) -> None:
        """Record data as it is. A rank that has only a part of it is left out: nothing states which part."""
        tensor_id = self._dispatcher.id_of(Site(LABELS, Kind.BATCH, slot), number)
        if self._resolver.is_like_reference(tensor_id, data):
            self._dispatcher.visit(tensor_id, data.detach(), number, stated=Placement(Region.whole(tuple(data.shape))))

    def keep(self, batch: Any, number: int) -> None:
        """Record a script's own data for this rank's microbatch of this number."""
        leaves = self._observe(dict(batch) if is_unknown_mapping(batch) else batch, number)
        for site, leaf in leaves:
            tensor_id = self._dispatcher.id_of(site, number)
            placement = self._resolver.resolve(tensor_id, leaf, number) or self._resolver.infer(tensor_id, leaf)
            if placement is not None:
                self._dispatcher.visit(tensor_id, leaf.detach(), number, fallback=placement)
            _add_rows(self.kept, f"{self._clock.step}/{site.slot}", leaf.detach().cpu())

    def _observe(self, batch: Any, number: int) -> list[tuple[Site, torch.Tensor]]:
        """Learn from the shapes of a batch how it is divided; return its tensors."""
        leaves = [
            (Site(ROOT, Kind.BATCH, name_slot(path)), leaf)
            for path, leaf in flatten_with_paths(batch)
            if isinstance(leaf, torch.Tensor)
        ]
        for site, leaf in leaves:
            self._resolver.observe_batch(TensorId(self._clock.step, number, site), tuple(leaf.shape))
        return leaves

    def replace(self, batch: Any, number: int, *, exact: bool = False) -> Any:
        """Generate data for this rank's microbatch of this number; with `exact`, in the range of the given data."""
        if is_unknown_mapping(batch):
            other = copy.copy(batch)
            other.update(self.replace(dict(batch), number, exact=exact))
            return other
        paths, structure = flatten_with_paths(batch), pytree.tree_structure(batch)
        observed = self._observe(batch, number)
        for site, leaf in observed:
            if leaf.device.type == "cpu" and leaf.ndim:
                _add_rows(self.replaced, f"{self._clock.step}/{site.slot}", leaf.detach())
        tensors = [(self._dispatcher.id_of(site, number), leaf) for site, leaf in observed]
        distributions = self._generator.choose_batch_distributions(tensors, exact=exact)
        chosen = iter(zip(tensors, distributions, strict=True))
        leaves = []
        for _, leaf in paths:
            if isinstance(leaf, torch.Tensor):
                (tensor_id, _), distribution = next(chosen)
                leaf, generated = self._generator.generate_leaf(tensor_id, leaf, number, distribution)
                self._dispatcher.visit(
                    tensor_id, leaf, number, values=generated.distribution, fallback=generated.placement
                )
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, structure)


def _add_rows(known: _Rows, slot: str, data: torch.Tensor) -> None:
    known[slot] = (*known.get(slot, ()), *map(_digest, data.unbind() if data.ndim else [data]))


def _digest(row: torch.Tensor) -> str:
    return hashlib.blake2b(view_memory(row.contiguous()), digest_size=8).hexdigest()
