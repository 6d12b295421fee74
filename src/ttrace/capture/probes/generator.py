"""Generated values for parameters and batches: the same logical values on every layout."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter
from ttrace.capture.plan import Plan
from ttrace.capture.probes.distributions import measure_batch, measure_parameter
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import CaptureError
from ttrace.layouts.placement import Placement
from ttrace.reference.parameter_source import ParameterSource, find_source
from ttrace.tensors.ids import Kind, TensorId
from ttrace.values.generate import Distribution, Normal, generate_values


@dataclass(frozen=True)
class GeneratedTensor:
    """The placement and the distribution of a generated tensor; no distribution if its own values were kept."""

    placement: Placement
    distribution: Distribution | None


class Generator:
    """Generator of this rank's regions.

    The reference decides the distributions; twins and candidates read them from its trace.
    """

    def __init__(
        self, plan: Plan, adapter: Adapter, resolver: LayoutResolver, reference: ReferenceTrace, tables: Collection[int]
    ) -> None:
        """Set up a generator; `tables` are the lengths of the model's embeddings."""
        self._tables = tables
        self._plan = plan
        self._adapter = adapter
        self._resolver = resolver
        self._reference = reference

    def fill_parameter(self, name: str, parameter: nn.Parameter) -> GeneratedTensor:
        """Replace a parameter's values, unless the plan keeps them."""
        tensor_id, own = TensorId.of(0, None, name, Kind.PARAM), self._adapter.read_values(parameter)
        placement = self._resolver.resolve_or_infer(tensor_id, own)
        source = find_source(parameter)
        if source is not None:
            return self._fill_source(tensor_id, source, own, placement)
        generated = GeneratedTensor(placement, self._choose_parameter_distribution(tensor_id, own))
        if generated.distribution is not None:
            with torch.no_grad():
                local = self._adapter.to_local(own)
                local.zero_()  # what lies outside of the region is padding
                inner = local[tuple(slice(size) for size in placement.region.local_shape)]
                inner.copy_(self._generate(tensor_id, generated, local))
        return generated

    def _fill_source(
        self, tensor_id: TensorId, source: ParameterSource, own: torch.Tensor, placement: Placement
    ) -> GeneratedTensor:
        """Tell a streamed parameter's source what to generate the values from."""
        if self._plan.parameters == "own":
            raise CaptureError(f"{tensor_id.name} is streamed and has no values of its own: it must be generated.")
        if self._adapter.mesh.num_ranks > 1:
            raise CaptureError(f"{tensor_id.name} is streamed, which takes a single process, not {self._adapter.mesh}.")
        if self._plan.reference is not None:
            source.distribution = self._reference.distribution(tensor_id) or source.distribution
        source.name, source.seed, source.shape = tensor_id, self._plan.seed, tuple(own.shape)
        return GeneratedTensor(placement, source.distribution)

    def generate_leaf(
        self, tensor_id: TensorId, leaf: torch.Tensor, microbatch: int, *, exact: bool = False
    ) -> tuple[torch.Tensor, GeneratedTensor]:
        """Generate data in place of one tensor of a batch; with `exact`, in the range of its own values.

        Where random numbers would destroy the structure of the data, the reference keeps its own data, and other runs
        replay them from its trace.
        """
        placement = self._resolver.resolve_or_infer(tensor_id, leaf, microbatch)
        generated = GeneratedTensor(placement, self._choose_batch_distribution(tensor_id, leaf, exact=exact))
        if generated.distribution is not None:
            return self._generate(tensor_id, generated, leaf), generated
        full = self._reference.tensor(tensor_id)
        return (leaf if full is None else placement.region.take(full).to(leaf.device, leaf.dtype)), generated

    def _generate(self, tensor_id: TensorId, generated: GeneratedTensor, like: torch.Tensor) -> torch.Tensor:
        assert generated.distribution is not None
        return generate_values(
            tensor_id,
            generated.placement.region,
            dtype=like.dtype,
            distribution=generated.distribution,
            seed=self._plan.seed,
            device=like.device,
        )

    def _choose_parameter_distribution(self, tensor_id: TensorId, parameter: torch.Tensor) -> Distribution | None:
        if self._plan.parameters == "own":
            return None
        if self._plan.reference is not None:
            return self._reference.distribution(tensor_id)
        own = measure_parameter(self._adapter.to_local(parameter))
        # A shard must not decide the spread of the whole: with several ranks, only the rounded mean is taken from it.
        return own if self._adapter.mesh.num_ranks == 1 else Normal(float(round(own.mean)), 0.02)

    def _choose_batch_distribution(
        self, tensor_id: TensorId, leaf: torch.Tensor, *, exact: bool
    ) -> Distribution | None:
        if self._plan.reference is not None:
            return self._reference.distribution(tensor_id)
        # With several ranks, only some have the embedding, and all must generate the same data.
        return measure_batch(leaf, self._tables if self._adapter.mesh.num_ranks == 1 and not exact else ())
