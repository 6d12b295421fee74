"""Sentences for the sources of layouts."""

from __future__ import annotations

from ttrace.layouts.source import LayoutSource, Provenance

_SENTENCES = {
    LayoutSource.DTENSOR: "DTensor",
    LayoutSource.DTENSOR_AND_SHAPES: "DTensor, and inferred from shapes",
    LayoutSource.SPMD_TYPES: "spmd_types",
    LayoutSource.HOLDS: "ttrace.holds",
    LayoutSource.HOLDS_OF_INPUT: "ttrace.holds of the input",
    LayoutSource.ROUTING: "the reference's routing",
    LayoutSource.RULE: "a rule",
    LayoutSource.ADAPTER: "the adapter",
    LayoutSource.DATA_PARALLEL: "data parallelism",
    LayoutSource.CONTEXT_PARALLEL: "context_parallel",
    LayoutSource.SINGLE_RANK: "single rank",
    LayoutSource.UNCUT_MESH: "no axis of this mesh cuts tensors",
    LayoutSource.UNKNOWN_TO_REFERENCE: "unknown to the reference",
    LayoutSource.FIRST_FORWARD: "the first forward",
    LayoutSource.RANKS: "rank by rank",
    LayoutSource.SHAPES: "inferred from shapes",
}


def describe_provenance(by: Provenance | None) -> str:
    """Say who decided a layout; empty if nobody did."""
    if by is None:
        return ""
    return by.detail or _SENTENCES[by.source]
