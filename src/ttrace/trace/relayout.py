"""Reader of a trace with new rules: after correcting an annotation, the run need not be traced again.

The layout that a tensor states itself, such as a DTensor's, precedes every rule, as it does in a run. A layout that was
copied from an input of the call (`ttrace.holds`) does not. Generated values and sketches belong to the recorded region,
so a rule that changes the region of such a tensor is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ttrace.errors import LayoutError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.layouts.region import Shape
from ttrace.layouts.rules import Rule, Rules, apply_rule
from ttrace.trace.reader import Shard, Trace
from ttrace.trace.store import Place


class RelayoutTrace(Trace):
    """A trace whose layouts are computed again from rules and from the shapes of the reference."""

    def __init__(self, folder: Place, rules: Rules, reference: Trace) -> None:
        super().__init__(folder)
        rules.check(self.mesh)
        self._rules, self._reference = rules, reference

    @cached_property
    def identity(self) -> str:
        return f"{super().identity} by {self._rules!r}"

    def _collect_shards(self) -> dict[TensorId, list[Shard]]:
        return {
            tensor_id: [self._relayout(shard) for shard in shards]
            for tensor_id, shards in super()._collect_shards().items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        _ = self.shards  # reading them tries every rule
        return (*super().notes, *(f"{rule} matched nothing" for rule in self._rules.list_unused()))

    def _relayout(self, shard: Shard) -> Shard:
        record, rule = shard.record, self._rules.decide(shard.id.site)
        is_run = record.region is not None and record.region.flat is not None
        if rule is None or is_run or (record.source is not None and record.source.precedes_rules):
            return shard
        if MICROBATCH_AXIS in rule.layout.axes and shard.id.microbatch is not None:
            raise _make_refusal(shard.id, rule, "its microbatches were recorded as separate tensors")
        where = {**shard.coord, MICROBATCH_AXIS: record.microbatch}
        placement = apply_rule(rule, shard.id.site, record.shape, self._shape(shard.id), sizes=self.sizes, where=where)
        if placement.region != record.region:
            if record.sketch is not None:
                raise _make_refusal(shard.id, rule, "its sketch was computed for the recorded layout")
            if record.values is not None:
                raise _make_refusal(shard.id, rule, "its values were generated for the recorded layout")
        moved = replace(
            record, region=placement.region, pending=placement.pending, layout=placement.layout, by=placement.by
        )
        return replace(shard, record=moved)

    def _shape(self, tensor_id: TensorId) -> Shape | None:
        shards = self._reference.shards.get(tensor_id)
        return shards[0].record.region.shape if shards and shards[0].record.region else None


def _make_refusal(tensor_id: TensorId, rule: Rule, why: str) -> LayoutError:
    return LayoutError(
        f"{tensor_id}: {rule} cannot be applied to a recorded trace, because {why}. Trace again with attach(rules=...)."
    )
