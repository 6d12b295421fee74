"""Generated values for parameters and batches: the same logical values on every layout.

`Generator` chooses the distribution of each parameter and batch, and generates this rank's part of the values.
`Batches` puts generated data in place of a script's batches.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ttrace.adapters.adapter import Adapter, OwnedSlice, find_rank_and_world
from ttrace.capture.observe.events import StepCounter
from ttrace.capture.observe.hooks import flatten_with_paths, is_unknown_mapping, name_slot
from ttrace.capture.observe.loaders import count_samples, read_further_batches
from ttrace.capture.plan import Plan
from ttrace.capture.probes.dispatch import Dispatcher
from ttrace.capture.probes.probe import Visit
from ttrace.capture.resolve.layout_resolver import LayoutResolver
from ttrace.capture.resolve.reference_trace import ReferenceTrace
from ttrace.errors import CaptureError
from ttrace.large_references.parameter_source import ParameterSource, find_source
from ttrace.layouts.ids import LABELS, ROOT, Kind, Site, TensorId
from ttrace.layouts.placement import Placement
from ttrace.layouts.region import Region
from ttrace.ports.port import Port, Ported
from ttrace.trace.tensor_bytes import is_asynchronous, view_memory
from ttrace.values.generate import Distribution, Integers, Mask, Normal, Rows, generate_values
from ttrace.values.stats import has_few_values


@dataclass(frozen=True)
class GeneratedTensor:
    """The placement and the distribution of a generated tensor; no distribution if its own values were kept."""

    placement: Placement
    distribution: Distribution | None


@dataclass(eq=False)
class Generator:
    """Generator of this rank's regions.

    The reference decides the distributions; twins and candidates read them from its trace.
    """

    plan: Plan
    adapter: Adapter
    resolver: LayoutResolver
    reference: ReferenceTrace
    tables: Collection[int]
    """The lengths of the model's embeddings."""
    port: Port | None = None
    class_counts: Collection[int] = ()
    """The numbers of classes in the model's logits, as far as they are known."""

    def __post_init__(self) -> None:
        self._measured: dict[Any, Distribution | None] = {}
        """The distributions of batches, by site, shape and dtype."""

    @property
    def is_first(self) -> bool:
        """Whether other runs replay what this one generates, and this process has all of each tensor."""
        return self.plan.reference is None and self.adapter.mesh.num_ranks == 1

    def fill_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, GeneratedTensor]:
        """Replace the values of parameters, unless the plan keeps them."""
        owned = {name: self.adapter.read_values(parameter) for name, parameter in parameters.items()}
        chosen = self._choose_distributions(
            {name: each.tensor for name, each in owned.items() if find_source(parameters[name]) is None},
            [name for name, parameter in parameters.items() if not parameter.requires_grad],
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
                local = self.adapter.to_local(own)
                local.zero_()  # what is outside of the region is padding
                if self.port is not None:
                    self._fill_ported(tensor_id, self.port.port(tensor_id.site, local.ndim), generated, local)
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
            return self.resolver.resolve_or_infer(tensor_id, owned.tensor)
        box = torch.empty(owned.shape or owned.tensor.shape, dtype=owned.tensor.dtype, device="meta")
        placement, (begin, end) = self.resolver.resolve_or_infer(tensor_id, box), owned.run
        return replace(placement, region=replace(placement.region, flat=(owned.run,) if begin < end else ()))

    def _fill_source(
        self, tensor_id: TensorId, source: ParameterSource, own: torch.Tensor, placement: Placement
    ) -> GeneratedTensor:
        """Set from what a streamed parameter's source generates the values."""
        if self.plan.parameters == "own":
            raise CaptureError(f"{tensor_id.name} is streamed and has no values of its own: it must be generated.")
        if self.adapter.mesh.num_ranks > 1:
            raise CaptureError(f"{tensor_id.name} is streamed, which needs a single process, not {self.adapter.mesh}.")
        if self.plan.reference is not None:
            source.distribution = self.reference.distribution(tensor_id) or source.distribution
        source.name, source.seed, source.shape = tensor_id, self.plan.seed, tuple(own.shape)
        return GeneratedTensor(placement, source.distribution)

    def generate_leaf(
        self, tensor_id: TensorId, leaf: torch.Tensor, microbatch: int, distribution: Distribution | None
    ) -> tuple[torch.Tensor, GeneratedTensor]:
        """Generate data in place of one tensor of a batch, from its distribution.

        Where random numbers would destroy the structure of the data, the reference keeps its own data, and other runs
        replay it from the reference's trace.
        """
        placement = self.resolver.resolve_or_infer(tensor_id, leaf, microbatch)
        generated = GeneratedTensor(placement, distribution)
        if generated.distribution is not None:
            return self._generate(tensor_id, generated, leaf), generated
        full = self.reference.tensor(tensor_id)
        return (leaf if full is None else placement.region.take(full).to(leaf.device, leaf.dtype)), generated

    def _generate(self, tensor_id: TensorId, generated: GeneratedTensor, like: torch.Tensor) -> torch.Tensor:
        assert generated.distribution is not None
        return generate_values(
            tensor_id,
            generated.placement.region,
            dtype=like.dtype,
            distribution=generated.distribution,
            seed=self.plan.seed,
            device=like.device,
        )

    def _choose_distributions(
        self, parameters: Mapping[str, torch.Tensor], frozen: Collection[str]
    ) -> Mapping[str, Distribution | None]:
        if self.plan.parameters == "own":
            return {}
        if self.plan.reference is not None:
            wholes = {name: name if self.port is None else self.port.rename(name) for name in parameters}
            return {
                name: self.reference.distribution(TensorId.of(0, None, whole, Kind.PARAM))
                for name, whole in wholes.items()
            }
        measured = measure_parameters(self.adapter.to_local(parameter) for parameter in parameters.values())
        if self.adapter.mesh.num_ranks > 1:
            # A shard must not decide the spread of the whole: only the rounded mean is taken from it.
            measured = [Normal(float(round(own.mean)), 0.02) for own in measured]
        if self.port is not None:
            measured = self._pool(self.port, parameters, measured)
        elif self.adapter.mesh.num_ranks == 1:
            # Tables and masks keep their values on every side, as buffers do, so a wrong one is found.
            computed = {name for name in frozen if name in parameters and is_computed(parameters[name])}
            return {n: None if n in computed else own for n, own in zip(parameters, measured, strict=True)}
        return dict(zip(parameters, measured, strict=True))

    def _pool(self, port: Port, parameters: Mapping[str, torch.Tensor], measured: Sequence[Normal]) -> list[Normal]:
        """Give all parts of a whole the distribution of the whole: the other side has only the whole."""
        wholes: dict[str, list[tuple[int, Normal]]] = {}
        for (name, tensor), own in zip(parameters.items(), measured, strict=True):
            wholes.setdefault(port.rename(name), []).append((tensor.numel(), own))
        return [pool_normals(wholes[port.rename(name)]) for name in parameters]

    def choose_batch_distributions(
        self, leaves: Sequence[tuple[TensorId, torch.Tensor]], *, exact: bool
    ) -> list[Distribution | None]:
        """Choose the distributions of a batch's tensors; with `exact`, in the range of their own values.

        The reference measures only the first tensor of each site, shape and dtype: later microbatches and steps have
        the same distributions.
        """
        if self.plan.reference is not None:
            return [self.reference.distribution(tensor_id) for tensor_id, _ in leaves]
        # With several ranks, only some have the embedding, and all must generate the same data.
        tables = self.tables if self.adapter.mesh.num_ranks == 1 and not exact else ()
        keys = [(tensor_id.site, leaf.shape, leaf.dtype, exact) for tensor_id, leaf in leaves]
        new = {key: leaf for key, (_, leaf) in zip(keys, leaves, strict=True) if key not in self._measured}
        is_whole = self.adapter.mesh.num_ranks == 1  # one rank's part of a mask may have few values, another's one
        for key, leaf in zip(new, copy_to_host(list(new.values())), strict=True):
            # Normal numbers are far from any mask: attention saturates, and the gradients of queries and keys are zero
            # on both sides. Random draws of a mask's own values could mask all keys of a row.
            is_kept = is_whole and has_few_values(leaf)
            self._measured[key] = None if is_kept else measure_batch(leaf, tables, self.class_counts)
        return [self._measured[key] for key in keys]


_FLAT_STD = 0.02
"""The standard deviation for parameters that start as constants: zero biases and unit norm weights hide bugs."""


def read_numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Read tensors of one element each, with one wait for each device."""
    numbers = list(tensors)
    values = [0.0] * len(numbers)
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    for here in places.values():
        for place, value in zip(here, _stack(numbers[place] for place in here).tolist(), strict=True):
            values[place] = value
    return values


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host, with one wait for each device."""
    copies = [tensor.detach().to("cpu", non_blocking=is_asynchronous(tensor)) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if is_asynchronous(tensor)}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def measure_parameters(parameters: Iterable[torch.Tensor]) -> list[Normal]:
    """Measure the mean and spread of each parameter as it was initialised."""
    numbers = read_numbers(number for parameter in parameters for number in _compute_moments(parameter))
    return [_make_normal(mean, std) for mean, std in zip(numbers[::2], numbers[1::2], strict=True)]


def _make_normal(mean: float, std: float) -> Normal:
    if not math.isfinite(mean) or not math.isfinite(std):  # uninitialised memory, or masks of -inf
        return Normal(0.0, _FLAT_STD)
    return Normal(mean, std if std > 1e-6 * abs(mean) else _FLAT_STD)


def pool_normals(parts: Sequence[tuple[int, Normal]]) -> Normal:
    """Return the mean and spread of several tensors together; each is given with its number of elements."""
    if len(parts) == 1:
        return parts[0][1]
    count = sum(number for number, _ in parts)
    mean = sum(number * own.mean for number, own in parts) / count
    square = sum(number * (own.std**2 + own.mean**2) for number, own in parts) / count
    return Normal(mean, math.sqrt(max(square - mean**2, 0.0)))


def _compute_moments(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data = parameter.detach().to(torch.float64)
    zero = torch.zeros((), dtype=torch.float64, device=data.device)
    return data.mean() if data.numel() else zero, data.std(correction=0) if data.numel() > 1 else zero


_LEAST_CORRELATION = 0.5
_NUM_SIGMAS = 5.0
_MOST_READ = 1 << 20
"""About so many elements of a large tensor show whether it was computed."""


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether values were computed without random numbers, such as a table of positions or a mask.

    This is so if elements follow from their neighbours along some dim. The correlation of neighbours is that of a
    sinusoidal table (0.54 at its highest frequency, 1 at its lowest) or a causal mask (above 0.8); that of n random
    numbers is 0 +- n**-0.5. Values of a constant are not correlated, and a constant may be replaced.
    """
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() < 2:
        return False
    edge = max(2, int(_MOST_READ ** (1 / tensor.ndim)))
    data = tensor.detach()[(slice(edge),) * tensor.ndim].to(torch.float64)
    finite = data.masked_fill(~data.isfinite(), 0.0)
    # Infinities of a mask count as its largest value, with their sign.
    data = torch.where(data.isinf(), data.sign() * (2.0 * finite.abs().max() + 1.0), data)
    data = data - data.mean()
    square = float(data.square().mean())
    limit = max(_LEAST_CORRELATION, _NUM_SIGMAS * data.numel() ** -0.5)
    return square > 0.0 and any(_correlate(data, dim) > limit * square for dim in range(data.ndim))


def _correlate(data: torch.Tensor, dim: int) -> float:
    """Compute the mean product of neighbours along a dim."""
    num_pairs = data.shape[dim] - 1
    return float((data.narrow(dim, 0, num_pairs) * data.narrow(dim, 1, num_pairs)).mean()) if num_pairs else 0.0


def _stack(numbers: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([number.detach().reshape(()).to(torch.float64) for number in numbers])


def measure_batch(
    data: torch.Tensor, tables: Collection[int] = (), class_counts: Collection[int] = ()
) -> Distribution | None:
    """Measure the distribution of a batch's tensor on the host.

    None for data with a structure that random numbers would destroy. `tables` are the lengths of the model's
    embeddings. Integers whose maximum is in the second half of a table are treated as rows of that table, or as labels;
    generated integers may then be any row of it that has a class in all logits with so many classes.
    """
    if data.numel() == 0:
        return None
    if data.is_floating_point():
        return measure_parameters([data])[0] if bool(data.isfinite().all()) else None
    if data.dtype == torch.bool:
        return Mask(float(data.to(torch.float64).mean()))
    low, high = int(data.min()), int(data.max())
    if data.ndim > 0 and data.shape[-1] > 1 and _is_counted(data):
        return None
    num_rows = min((length for length in tables if high < length <= 2 * high), default=None)
    # A vocabulary may be padded: the embedding then has more rows than the logits have classes.
    limit = min((count for count in class_counts if high < count < (num_rows or 0)), default=0)
    if low >= 0:
        return Integers(low, high + 1) if num_rows is None else Rows(num_rows, limit=limit)
    is_kept = data >= 0
    if not bool(is_kept.any()) or bool((data[~is_kept] != low).any()):
        return None
    share = float(is_kept.to(torch.float64).mean())
    if num_rows is not None:
        return Rows(num_rows, keep=share, hole=low, limit=limit)
    return Integers(int(data[is_kept].min()), high + 1, keep=share, hole=low)


def _is_counted(data: torch.Tensor) -> bool:
    """Whether rows never fall, as positions, offsets and constants, or count from 0 for each of several documents."""
    rises = data.diff(dim=-1)
    is_counted = bool(((rises == 1) | (data[..., 1:] == 0)).all()) and int(data.max()) > 1
    return is_counted or bool((rises >= 0).all())


_Rows = dict[str, tuple[str, ...]]
"""By step and slot, the digest of each row of data that this rank had."""


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
        """The rows of data that generated data replaced, if they were on the host."""
        self._telling: dict[_Leaf, torch.Tensor] | None = None
        """Tensors of further batches to use in place of masks without zeros and labels of which none is ignored."""
        self.num_samples = 0
        """The length of the dataset that this rank's loader draws as a whole; 0 if there is none."""

    def generate(self, batch: Any) -> Any:
        """Generate the next batch, with this batch's own structure, shapes, ranges and dtypes."""
        number = self._clock.num_batches
        self._clock.num_batches += 1
        return self.replace(batch, number)

    def compare(self, slot: str, data: torch.Tensor, number: int) -> None:
        """Record data as it is. Data of which this rank has only a part is left out: nothing states which part."""
        tensor_id = self._dispatcher.id_of(Site(LABELS, Kind.BATCH, slot), number)
        if self._resolver.is_like_reference(tensor_id, data):
            whole = Placement(Region.whole(tuple(data.shape)))
            self._dispatcher.visit(Visit(tensor_id, data.detach(), whole, number))

    def keep(self, batch: Any, number: int) -> None:
        """Record a script's own data for this rank's microbatch of this number."""
        leaves = self._observe(dict(batch) if is_unknown_mapping(batch) else batch, number)
        for site, leaf in leaves:
            tensor_id = self._dispatcher.id_of(site, number)
            placement = self._resolver.resolve(tensor_id, leaf, number) or self._resolver.infer(tensor_id, leaf)
            if placement is not None:
                self._dispatcher.visit(Visit(tensor_id, leaf.detach(), None, number, fallback=placement))
            _add_rows(self.kept, f"{self._clock.step}/{site.slot}", leaf.detach().cpu())

    def _observe(self, batch: Any, number: int) -> list[tuple[Site, torch.Tensor]]:
        """Learn from the shapes of a batch how it is divided over ranks; return its tensors."""
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
        if not self.replaced and find_rank_and_world()[1] > 1:
            self.num_samples = count_samples()
        for site, leaf in observed:
            if leaf.device.type == "cpu" and leaf.ndim:
                _add_rows(self.replaced, f"{self._clock.step}/{site.slot}", leaf.detach())
        if self._generator.is_first and not exact:
            observed = self._use_further_batches(observed)
        tensors = [(self._dispatcher.id_of(site, number), leaf) for site, leaf in observed]
        distributions = self._generator.choose_batch_distributions(tensors, exact=exact)
        chosen = iter(zip(tensors, distributions, strict=True))
        leaves = []
        for _, leaf in paths:
            if isinstance(leaf, torch.Tensor):
                (tensor_id, leaf), distribution = next(chosen)
                leaf, generated = self._generator.generate_leaf(tensor_id, leaf, number, distribution)
                values, fallback = generated.distribution, generated.placement
                self._dispatcher.visit(Visit(tensor_id, leaf, None, number, values=values, fallback=fallback))
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, structure)

    def _use_further_batches(self, observed: list[tuple[Site, torch.Tensor]]) -> list[tuple[Site, torch.Tensor]]:
        """Replace masks without zeros, and labels of which none is ignored, by those of a batch that has some."""
        plain = {_describe_leaf(site.slot, leaf): leaf for site, leaf in observed if _is_plain(leaf)}
        if self._telling is None:
            self._telling = _find_telling(plain) if plain else {}
        found = [self._telling.get(_describe_leaf(site.slot, leaf)) for site, leaf in observed]
        return [
            (site, leaf if other is None or not _is_plain(leaf) else other.to(leaf.device))
            for (site, leaf), other in zip(observed, found, strict=True)
        ]


_Leaf = tuple[str, torch.Size, torch.dtype]


def _describe_leaf(slot: str, leaf: torch.Tensor) -> _Leaf:
    return slot, leaf.shape, leaf.dtype


def _find_telling(plain: Mapping[_Leaf, torch.Tensor]) -> dict[_Leaf, torch.Tensor]:
    """Find the first batch of the script's loader in which masks have zeros or labels are ignored."""
    for batch in read_further_batches():
        leaves = [(name_slot(path), leaf) for path, leaf in flatten_with_paths(batch) if isinstance(leaf, torch.Tensor)]
        found = {_describe_leaf(slot, leaf): leaf for slot, leaf in leaves}
        telling = {key: leaf for key, leaf in found.items() if key in plain and _tells_more(leaf, plain[key])}
        if telling:
            return telling
    return {}


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether this may be a mask without zeros, or labels of which none is ignored."""
    if leaf.ndim < 2 or leaf.numel() < 2 or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_complex():
        return False
    return _is_constant(leaf) or not (leaf.is_floating_point() or leaf.dtype is torch.bool or bool((leaf < 0).any()))


def _tells_more(leaf: torch.Tensor, than: torch.Tensor) -> bool:
    return not _is_constant(leaf) if _is_constant(than) else bool((leaf < 0).any())


def _is_constant(leaf: torch.Tensor) -> bool:
    return bool((leaf == leaf.flatten()[0]).all())


def _add_rows(known: _Rows, slot: str, data: torch.Tensor) -> None:
    known[slot] = (*known.get(slot, ()), *map(_digest, data.unbind() if data.ndim else [data]))


def _digest(row: torch.Tensor) -> str:
    return hashlib.blake2b(view_memory(row.contiguous()), digest_size=8).hexdigest()
