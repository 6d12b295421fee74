"""A model in two implementations: every tensor is compared, a wrong one is found, and the map can be suggested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ttrace.adapters.registry import make_adapter
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.errors import CaptureError, TTraceError
from ttrace.judge.verdict import Exit, Judgement, Verdict
from ttrace.ports.port_map import IgnoredSites, Join, PortMap
from ttrace.ports.suggest import suggest_map
from ttrace.trace.reader import Trace
from zoo.harness.runs import NUM_TWINS, judge

HIDDEN, INNER, VOCAB, ROWS, LENGTH = 8, 12, 20, 3, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.gate_proj = nn.Linear(HIDDEN, INNER)
        self.up_proj = nn.Linear(HIDDEN, INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.input_layernorm(x)
        out: torch.Tensor = x + self.down_proj(self.gate_proj(normed).sigmoid() * self.up_proj(normed))
        return out


class PortedLayer(nn.Module):
    """With joined weights, a mask that it does not use, and a tuple as its output."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.linear_fc1 = nn.Linear(HIDDEN, 2 * INNER)
        self.linear_fc2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.swapped = swapped

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = self.linear_fc1(self.attention_norm(x)).chunk(2, -1)
        if self.swapped:
            gate, up = up, gate
        return x + self.linear_fc2(gate.sigmoid() * up), mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class Ported(nn.Module):
    def __init__(self, num_padded: int = 0, swapped: int | None = None) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB + num_padded, HIDDEN)
        self.layers = nn.ModuleList(PortedLayer(swapped=number == swapped) for number in range(2))
        self.output_layer = nn.Linear(HIDDEN, VOCAB + num_padded, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(ids).transpose(0, 1)
        for layer in self.layers:
            x, _ = layer(x, mask=torch.ones(LENGTH, LENGTH))
        logits: torch.Tensor = self.output_layer(x).transpose(0, 1)
        return logits


ORDER = "batch seq ... -> seq batch ..."
MAP = PortMap(
    names={
        "embed_tokens": "word_embeddings",
        "layers.*.input_layernorm": "layers.*.attention_norm",
        "layers.*.down_proj": "layers.*.linear_fc2",
        "lm_head": "output_layer",
    },
    slots={"layers.*/output": "0"},
    dims={"layers": ORDER, "output_layer": ORDER},
    join=(Join(parts=("layers.*.gate_proj", "layers.*.up_proj"), whole="layers.*.linear_fc1"),),
    padded=("word_embeddings", "output_layer"),
    ignore=IgnoredSites(candidate=("layers.*/input.mask", "layers.*/*output.1", "./*output"), reference=("./*output",)),
)


def trace(model: nn.Module, plan: Plan, loss: Callable[..., Any] = nn.functional.cross_entropy) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    session = TracingSession(SessionParts(plan, model, optimizer, make_adapter(None, [model], optimizer, None)))
    with session.step():
        batch = session.batch({name: torch.randint(VOCAB, (ROWS, LENGTH)) for name in ("ids", "labels")})
        loss(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    session.close()


def trace_both(folder: Path, ported: nn.Module, port: PortMap = MAP, **settings: Any) -> Judgement:
    reference = folder / "reference"
    plan = Plan(out=reference, port=port, stop=False, **settings)
    trace(Model(), plan)
    plan = plan.model_copy(update={"reference": settings.get("reference", reference)})
    for twin in range(1, NUM_TWINS + 1):
        update = {"role": "twin", "twin": twin, "out": folder / f"twin-{twin}", "reference": reference}
        trace(Model(), plan.model_copy(update=update))
    trace(ported, plan.model_copy(update={"role": "candidate", "out": folder / "candidate", "reference": reference}))
    return judge(folder, folder / "candidate")


def test_two_implementations_agree(tmp_path: Path) -> None:
    judgement = trace_both(tmp_path, Ported())
    assert judgement.exit is Exit.PASSED, (judgement.problems, judgement.findings)
    assert {c.verdict for c in judgement.comparisons} == {Verdict.PASS}
    sites = {str(c.id.site) for c in judgement.comparisons}
    joined = "layers.1.linear_fc1"
    assert {f"{joined}/{kind}" for kind in ("input", "output", "grad_input", "grad_output")} <= sites
    kinds = ("param", "param_grad", "update", "param_after", "optim.exp_avg", "optim.step")
    assert {f"{joined}.{name}/{kind}" for name in ("weight", "bias") for kind in kinds} <= sites
    assert not any("gate_proj" in site or "embed_tokens" in site for site in sites)
    assert any("the map ignores" in note and "layers.0/input.mask" in note for note in judgement.notes)


def test_halves_that_are_taken_for_each_other_are_found(tmp_path: Path) -> None:
    judgement = trace_both(tmp_path, Ported(swapped=1))
    assert judgement.exit is Exit.FOUND
    assert judgement.findings[0].module == "layers.1", "what is between its two projections"


def test_modules_are_isolated_on_both_sides(tmp_path: Path) -> None:
    """Gate and up get the same generated input, though they are two modules on one side."""
    trace_both(tmp_path / "ordinary", Ported())
    folder = tmp_path / "isolated"
    judgement = trace_both(folder, Ported(swapped=0), isolated=True, reference=tmp_path / "ordinary" / "reference")
    wrong = {str(c.id.site) for c in judgement.comparisons if c.verdict.is_wrong and "input" in str(c.id.site)}
    assert "layers.0.linear_fc2/input" in wrong
    right = {str(c.id.site) for c in judgement.comparisons if c.verdict is Verdict.PASS}
    assert {"layers.1.linear_fc1/output", "layers.1.linear_fc2/output", "layers.1/output.0"} <= right


def test_padding_is_left_out_of_all_tensors_and_found_in_the_loss(tmp_path: Path) -> None:
    judgement = trace_both(tmp_path, Ported(num_padded=4))
    assert judgement.exit is Exit.FOUND
    first = judgement.findings[0]
    assert (str(first.comparison.id.site), first.cause.name.value) == ("./loss", "padded vocabulary")
    assert "over 4 padded tokens" in first.cause.sentence
    right = {str(c.id.site) for c in judgement.comparisons if c.verdict is Verdict.PASS}
    assert {"word_embeddings.weight/param", "output_layer/output"} <= right


def test_a_map_that_does_not_fit_says_so(tmp_path: Path) -> None:
    port = MAP.model_copy(update={"join": (Join(parts=("layers.*.gate_proj", "layers.*.w3"), whole="layers.*.fc1"),)})
    with pytest.raises(CaptureError, match=r"lacks its part layers\.\*\.w3"):
        trace(Model(), Plan(out=tmp_path / "reference", port=port, stop=False))
    port = MAP.model_copy(update={"join": (MAP.join[0].model_copy(update={"groups": "num_groups"}),)})
    with pytest.raises(CaptureError, match="needs num_groups"):
        trace(Model(), Plan(out=tmp_path / "other", port=port, stop=False))


def suggested(folder: Path, ported: nn.Module) -> PortMap:
    for name, model in (("ours", Model()), ("theirs", ported)):
        trace(model, Plan(out=folder / name, stop=False))
    return suggest_map(Trace(folder / "ours"), Trace(folder / "theirs"))


def test_a_suggested_map_compares_as_much_as_one_by_hand(tmp_path: Path) -> None:
    found = suggested(tmp_path, Ported())
    assert found.names == MAP.names
    assert found.join == MAP.join
    by_hand, by_names = (
        trace_both(tmp_path / str(i), Ported(), port)
        for i, port in enumerate((MAP.model_copy(update={"padded": ()}), found))
    )
    assert by_names.exit is Exit.PASSED
    assert {c.id for c in by_hand.comparisons} <= {c.id for c in by_names.comparisons}


def test_padding_is_suggested(tmp_path: Path) -> None:
    assert suggested(tmp_path, Ported(num_padded=4)).padded == ("word_embeddings.weight", "output_layer.weight")


def test_what_no_name_and_shape_decides_is_not_suggested(tmp_path: Path) -> None:
    other = Ported()
    for layer in other.layers:
        layer.linear_fc1 = nn.Linear(HIDDEN, 2 * INNER, bias=False)
    with pytest.raises(TTraceError, match=r"do not pair .* layers\.\*\.gate_proj\.bias"):
        suggested(tmp_path, other)
