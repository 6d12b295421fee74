"""Ports: models of transformers as references, and the same models of megatron-core as candidates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ttrace.adapters.registry import make_adapter
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.verdict import Judgement
from ttrace.ports.port_map import PortMap
from ttrace.ports.suggest import suggest_map
from ttrace.trace.reader import Trace
from zoo.harness.limits import HANG
from zoo.harness.megatron.case import Case
from zoo.harness.megatron.data import Batch, microbatch
from zoo.harness.megatron.runtime import on_megatron
from zoo.harness.megatron.traced import Fault, trace
from zoo.harness.plans import planned
from zoo.harness.runs import NUM_TWINS, judge

Layout = Mapping[str, Any]
"""What a candidate has that its family's case has not."""
_LLAMA = Case(
    layers=2,
    groups=2,
    tied=False,
    bias=False,
    swiglu=True,
    rope=True,
    rmsnorm=True,
    samples=4,
    aux_loss=0.0,
)


@dataclass(frozen=True)
class Family:
    """A family of models, as both sides build it, and the map between them."""

    port_map: str
    case: Case
    model: str
    """The class of transformers that has it."""
    config: tuple[tuple[str, Any], ...] = ()
    """What its config has beside what all families have."""
    prepare: Callable[[Any], None] | None = None
    """Done to the model of transformers once it is built."""

    def build(self, vocab: int) -> Any:
        """Build the model of transformers, with so many words."""
        import transformers

        case = self.case
        model = getattr(transformers, self.model)
        config = model.config_class(
            vocab_size=vocab,
            hidden_size=case.hidden,
            intermediate_size=case.ffn,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.groups or case.heads,
            rms_norm_eps=case.eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="eager",
            **dict(self.config),
        )
        torch.manual_seed(0)
        built = model(config)
        if self.prepare is not None:
            self.prepare(built)
        return built


_EXPERTS = (("num_experts_per_tok", _LLAMA.topk), ("moe_intermediate_size", _LLAMA.ffn))
FAMILIES = {
    "llama": Family("llama-megatron", _LLAMA, "LlamaForCausalLM"),
    "qwen3": Family("qwen3-megatron", replace(_LLAMA, qk_norm=True), "Qwen3ForCausalLM", (("head_dim", 8),)),
    "qwen3-moe": Family(
        "qwen3-moe-megatron",
        replace(_LLAMA, qk_norm=True, experts=4),
        "Qwen3MoeForCausalLM",
        (("head_dim", 8), ("num_experts", 4), ("norm_topk_prob", True), *_EXPERTS),
    ),
    "deepseek-v3": Family(
        "deepseek-v3-megatron",
        replace(_LLAMA, groups=0, eps=1e-6, mla=True, experts=4, shared_expert=True, sigmoid=True),
        "DeepseekV3ForCausalLM",
        (
            ("n_routed_experts", 4),
            ("n_shared_experts", 1),
            ("n_group", 1),
            ("topk_group", 1),
            ("first_k_dense_replace", 0),
            ("q_lora_rank", 16),
            ("kv_lora_rank", 16),
            ("qk_nope_head_dim", 8),
            ("qk_rope_head_dim", 4),
            ("v_head_dim", 8),
            *_EXPERTS,
        ),
    ),
}


def judge_ports(
    num_ranks: int,
    family: Family,
    layouts: Sequence[Layout],
    folder: Path,
    *,
    faults: Sequence[Fault | None] = (),
    vocab: int = 0,
    port: PortMap | None = None,
) -> list[Judgement]:
    """Judge a family's model of megatron-core in several layouts; `faults` may spoil one each.

    Without `port`, the family's own map is used.
    """
    port = port or PortMap.load(family.port_map)
    trace_reference(family, folder, port, vocab=vocab)
    named = [(f"candidate-{i}", layout) for i, layout in enumerate(layouts)]
    todo = [(name, layout, fault) for (name, layout), fault in itertools.zip_longest(named, faults)]
    trace_candidates(num_ranks, family, todo, folder, port, vocab=vocab)
    return [judge(folder, folder / name) for name, _ in named]


def trace_candidates(
    num_ranks: int,
    family: Family,
    todo: Sequence[tuple[str, Layout, Fault | None]],
    folder: Path,
    port: PortMap,
    *,
    vocab: int = 0,
    timeout: float = HANG,
) -> None:
    """Trace models of megatron-core in one launch: the name of each, its layout and what is done to it."""
    num_words = vocab or family.case.vocab
    on_megatron(num_ranks, _trace_candidates, family.case, todo, folder, port, num_words, timeout=timeout)


def _trace_candidates(
    case: Case, todo: Sequence[tuple[str, Layout, Fault | None]], folder: Path, port: PortMap, vocab: int
) -> None:
    for name, layout, fault in todo:
        plan = planned(out=folder / name, role="candidate", reference=folder / "reference", port=port)
        trace(replace(case, **layout), plan, fault, partial(limit_words, vocab=vocab))


def suggest(family: Family, folder: Path) -> PortMap:
    """Suggest a map from one step of each side, traced under its own names."""
    _trace(family, planned(out=folder / "transformers"), 0)
    on_megatron(1, trace, family.case, planned(out=folder / "megatron"))
    return suggest_map(Trace(folder / "transformers"), Trace(folder / "megatron"))


def trace_reference(family: Family, folder: Path, port: PortMap, *, vocab: int = 0) -> None:
    """Trace a model of transformers and its twins in this process."""
    _trace(family, planned(out=folder / "reference", port=port), vocab)
    for twin in range(1, NUM_TWINS + 1):
        plan = planned(out=folder / f"twin-{twin}", role="twin", twin=twin, reference=folder / "reference", port=port)
        _trace(family, plan, vocab)


def _trace(family: Family, plan: Plan, vocab: int) -> None:
    model = family.build(vocab or family.case.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, foreach=False)
    session = TracingSession(SessionParts(plan, model, optimizer, make_adapter(None, [model], optimizer, None)))
    with session.step():
        train(family.case, model, optimizer, vocab)
    session.close()


def train(case: Case, model: Any, optimizer: torch.optim.Optimizer, vocab: int = 0) -> None:
    """Train one step on the batches that Megatron's side has."""
    batches = list(list_batches(case, vocab))
    for batch in batches:
        logits = model(batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        (loss / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()


def list_batches(case: Case, vocab: int = 0) -> Iterator[Batch]:
    """List the microbatches of one step, with no word from beyond the vocabulary."""
    for start in range(0, case.samples, case.micro):
        yield limit_words(microbatch(case, 0, range(start, start + case.micro)), vocab or case.vocab)


def limit_words(batch: Batch, vocab: int) -> Batch:
    """Return a batch whose words lie in a smaller vocabulary."""
    return batch | {name: batch[name] % vocab for name in ("tokens", "labels")}
