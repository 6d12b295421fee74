"""Generated values for parameters and batches: the same logical values on every layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ttrace.adapters.adapter import Adapter, OwnedSlice
from ttrace.capture.plan import Plan
from ttrace.capture.probes.distributions import copy_to_host, measure_batch, measure_parameters, pool_normals
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, find_source
from ttrace.layouts.ids import Kind, TensorId
from ttrace.layouts.placement import Placement
from ttrace.ports.port import Port, Ported
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
        self,
        plan: Plan,
        adapter: Adapter,
        resolver: LayoutResolver,
        reference: ReferenceTrace,
        tables: Collection[int],
        port: Port | None = None,
    ) -> None:
        """Set up a generator; `tables` are the lengths of the model's embeddings."""
        self._tables = tables
        self._plan = plan
        self._adapter = adapter
        self._resolver = resolver
        self._reference = reference
        self._port = port
        self._measured: dict[Any, Distribution | None] = {}
        """The distributions of batches, by site, shape and dtype."""

    def fill_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, GeneratedTensor]:
        """Replace the values of parameters, unless the plan keeps them."""
        owned = {name: self._adapter.read_values(parameter) for name, parameter in parameters.items()}
        chosen = self._choose_distributions(
            {name: each.tensor for name, each in owned.items() if find_source(parameters[name]) is None}
        )
        return {
            name: self._fill_parameter(name, parameter, owned[name], chosen.get(name))
            for name, parameter in parameters.items()
        }

    def _fill_parameter(
        self, name: str, parameter: nn.Parameter, owned: OwnedSlice, distribution: Distribution | None
    ) -> GeneratedTensor:
        tensor_id = TensorId.of(0, None, name, Kind.PARAM)
        placement, own = self._place(tensor_id, owned), owned.tensor
        source = find_source(parameter)
        if source is not None:
            return self._fill_source(tensor_id, source, own, placement)
        generated = GeneratedTensor(placement, distribution)
        if generated.distribution is not None:
            with torch.no_grad():
                local = self._adapter.to_local(own)
                local.zero_()  # what lies outside of the region is padding
                if self._port is not None:
                    self._fill_ported(tensor_id, self._port.port(tensor_id.site, local.ndim), generated, local)
                    return generated
                inner = local[tuple(slice(size) for size in placement.region.local_shape)]
                inner.copy_(self._generate(tensor_id, generated, local))
        return generated

    def _fill_ported(
        self, tensor_id: TensorId, ported: Ported | None, generated: GeneratedTensor, local: torch.Tensor
    ) -> None:
        """Fill a parameter with its part of what is generated under the candidate's name."""
        if ported is None:
            raise CaptureError(f"the map ignores {tensor_id.name}, but a parameter must be generated on both sides.")
        placed = replace(generated, placement=ported.place(generated.placement))
        inner = ported.apply(local)[tuple(slice(size) for size in placed.placement.region.local_shape)]
        inner.copy_(self._generate(tensor_id._replace(site=ported.site), placed, local))

    def _place(self, tensor_id: TensorId, owned: OwnedSlice) -> Placement:
        if owned.run is None:
            return self._resolver.resolve_or_infer(tensor_id, owned.tensor)
        box = torch.empty(owned.shape or owned.tensor.shape, dtype=owned.tensor.dtype, device="meta")
        placement, (begin, end) = self._resolver.resolve_or_infer(tensor_id, box), owned.run
        return replace(placement, region=replace(placement.region, flat=(owned.run,) if begin < end else ()))

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
        self, tensor_id: TensorId, leaf: torch.Tensor, microbatch: int, distribution: Distribution | None
    ) -> tuple[torch.Tensor, GeneratedTensor]:
        """Generate data in place of one tensor of a batch, from its distribution.

        Where random numbers would destroy the structure of the data, the reference keeps its own data, and other runs
        replay them from its trace.
        """
        placement = self._resolver.resolve_or_infer(tensor_id, leaf, microbatch)
        generated = GeneratedTensor(placement, distribution)
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

    def _choose_distributions(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, Distribution | None]:
        if self._plan.parameters == "own":
            return {}
        if self._plan.reference is not None:
            wholes = {name: name if self._port is None else self._port.rename(name) for name in parameters}
            return {
                name: self._reference.distribution(TensorId.of(0, None, whole, Kind.PARAM))
                for name, whole in wholes.items()
            }
        measured = measure_parameters(self._adapter.to_local(parameter) for parameter in parameters.values())
        if self._adapter.mesh.num_ranks > 1:
            # A shard must not decide the spread of the whole: only the rounded mean is taken from it.
            measured = [Normal(float(round(own.mean)), 0.02) for own in measured]
        if self._port is not None:
            measured = self._pool(self._port, parameters, measured)
        return dict(zip(parameters, measured, strict=True))

    def _pool(self, port: Port, parameters: Mapping[str, torch.Tensor], measured: Sequence[Normal]) -> list[Normal]:
        """Give all parts of a whole the distribution that it has: the other side knows only the whole."""
        wholes: dict[str, list[tuple[int, Normal]]] = {}
        for (name, tensor), own in zip(parameters.items(), measured, strict=True):
            wholes.setdefault(port.rename(name), []).append((tensor.numel(), own))
        return [pool_normals(wholes[port.rename(name)]) for name in parameters]

    def choose_batch_distributions(
        self, leaves: Sequence[tuple[TensorId, torch.Tensor]], *, exact: bool
    ) -> list[Distribution | None]:
        """Choose the distributions of a batch's tensors; with `exact`, in the range of their own values.

        The reference measures the first of equal ones: later microbatches and steps have the same distributions.
        """
        if self._plan.reference is not None:
            return [self._reference.distribution(tensor_id) for tensor_id, _ in leaves]
        # With several ranks, only some have the embedding, and all must generate the same data.
        tables = self._tables if self._adapter.mesh.num_ranks == 1 and not exact else ()
        keys = [(tensor_id.site, leaf.shape, leaf.dtype, exact) for tensor_id, leaf in leaves]
        new = {key: leaf for key, (_, leaf) in zip(keys, leaves, strict=True) if key not in self._measured}
        for key, leaf in zip(new, copy_to_host(list(new.values())), strict=True):
            self._measured[key] = measure_batch(leaf, tables)
        return [self._measured[key] for key in keys]
