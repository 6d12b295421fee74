"""Reader of a trace with other rules than it was recorded with: a wrong annotation needs no new trace.

A tensor that states its own layout, for instance a DTensor, takes precedence over every rule, here as in a run. What it
takes over from an input of its call (`ttrace.holds`) does not.
Generated values and sketches were made for the recorded region, so they cannot move to another one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ttrace.errors import LayoutError
from ttrace.layouts.ids import TensorId
from ttrace.layouts.mesh import MICROBATCH_AXIS
from ttrace.layouts.region import Shape
from ttrace.layouts.rule_placement import apply_rule
from ttrace.layouts.rules import Rule, Rules
from ttrace.trace.reader import Shard, Trace
from ttrace.trace.store import Place


class RelayoutTrace(Trace):
    """A trace whose layouts are decided again, for tensors of the shapes that the reference has."""

    def __init__(self, folder: Place, rules: Rules, reference: Trace) -> None:
        super().__init__(folder)
        rules.check(self.mesh)
        self._rules, self._reference = rules, reference

    def __reduce__(self) -> tuple[type[RelayoutTrace], tuple[Place, Rules, Trace]]:  # type: ignore[override]  # more is needed
        return RelayoutTrace, (self.folder, self._rules, self._reference)

    @cached_property
    def identity(self) -> str:
        return f"{super().identity} by {self._rules!r}"

    @cached_property
    def shards(self) -> dict[TensorId, list[Shard]]:
        return {tensor_id: [self._relayout(shard) for shard in found] for tensor_id, found in super().shards.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        _ = self.shards  # every rule has been tried by now
        return (*super().notes, *(f"{rule} matched nothing" for rule in self._rules.list_unused()))

    def _relayout(self, shard: Shard) -> Shard:
        record, rule = shard.record, self._rules.decide(shard.id.site)
        is_run = record.region is not None and record.region.flat is not None
        if rule is None or is_run or (record.source is not None and record.source.precedes_rules):
            return shard
        if MICROBATCH_AXIS in rule.layout.axes and shard.id.microbatch is not None:
            raise _make_refusal(shard.id, rule, "its microbatches were recorded as tensors of their own")
        where = {**shard.coord, MICROBATCH_AXIS: record.microbatch}
        placement = apply_rule(rule, shard.id.site, record.shape, self._shape(shard.id), sizes=self.sizes, where=where)
        if placement.region != record.region:
            if record.sketch is not None:
                raise _make_refusal(shard.id, rule, "it was recorded as a sketch, which is of the layout that it had")
            if record.values is not None:
                raise _make_refusal(shard.id, rule, "its values were generated for the layout that it had")
        decided = replace(
            record, region=placement.region, pending=placement.pending, layout=placement.layout, by=placement.by
        )
        return replace(shard, record=decided)

    def _shape(self, tensor_id: TensorId) -> Shape | None:
        shards = self._reference.shards.get(tensor_id)
        return shards[0].record.region.shape if shards and shards[0].record.region else None


def _make_refusal(tensor_id: TensorId, rule: Rule, why: str) -> LayoutError:
    return LayoutError(f"{tensor_id}: {rule} comes too late, as {why}. Trace again with attach(rules=...).")
