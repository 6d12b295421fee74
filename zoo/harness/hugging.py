"""Small transformers models under the library's own parallelism, traced and judged.

The models are made from configs, saved to a folder and loaded with `from_pretrained(distributed_config=...)`, as a user
does; `ttrace.attach` gets the model and the optimizer, and nothing else. The reference is the same folder in one
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import ttrace
from ttrace.attach import PLAN_VARIABLE, DisabledSession, Session
from ttrace.capture.plan import Plan
from ttrace.judge.verdict import Judgement
from zoo.bug import Judge, Launcher, Patch
from zoo.harness.candidate import Candidate
from zoo.harness.cells import Traced
from zoo.harness.plans import planned
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import NUM_TWINS, judge
from zoo.launch import TIMEOUT, Sided, on_torch, patched
from zoo.seen import Seen

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when transformers is imported

VOCAB, LENGTH, BATCH = 48, 8, 2
MASKED: dict[str, Any] = {
    "tp_size": 2,
    "ep_size": 2,
    "ep_plan": {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"},
}
"""Expert parallelism in which every rank has all tokens, and those of other ranks' experts are masked."""
Change = Callable[[nn.Module], AbstractContextManager[None]]
"""Something done to a candidate while it trains, on every rank."""

_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
_LLAMA = _SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_DEEPSEEK = _LLAMA | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"tie_word_embeddings": True},
    "gpt2": _SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "qwen3_moe": _LLAMA
    | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "glm4_moe": _LLAMA
    | {
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
}


@dataclass(frozen=True)
class Case:
    """A model and the arguments of its DistributedConfig."""

    model: str
    name: str
    config: Mapping[str, Any]
    num_accumulated: int = 1
    """How many microbatches each rank with its own data runs."""
    experts: str = ""
    """How experts are computed, if not by the default of transformers."""
    num_ranks: int = 2
    microbatch_grads: bool = False

    @property
    def launcher(self) -> Launcher:
        return on_transformers

    def trace(self, out: Path, references: dict[Any, Path], patch: Patch | None, *, is_early: bool = False) -> Traced:  # noqa: ARG002
        """On every rank: trace the candidate; the reference is there."""
        model = distributed(self, out.parent)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = planned(out=out, role="candidate", reference=self.reference(out.parent) / "reference")
        plan = plan.model_copy(update={"microbatch_grads": self.microbatch_grads})
        candidate = Candidate([model], optimizer, lambda _: None)
        with patched(patch, candidate):
            train(attached(plan, model, optimizer), model, optimizer, self.num_accumulated)
        return Traced(self.reference(out.parent), out)

    @property
    def num_microbatches(self) -> int:
        return self.num_accumulated * int(self.config.get("fsdp_size", 1))

    def saved(self, folder: Path) -> Path:
        return folder / self.model

    def reference(self, folder: Path) -> Path:
        return folder / f"{self.model}-{self.num_microbatches}-microbatches{'-each' * self.microbatch_grads}"

    def __str__(self) -> str:
        return f"{self.model}-{self.name}-{self.num_accumulated}"


def on_transformers(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """The launcher of these cases: all references in one process, then all candidates."""
    folder.mkdir(parents=True)
    on_ranks(1, trace_references, folder, [run.case for run in runs], timeout=TIMEOUT * (5 + len(runs)))
    return on_torch(num_ranks, runs, folder, judge)


def trace_references(folder: Path, cases: list[Case]) -> None:
    """On one rank: the model of every case, as it is in one process, and its twins."""
    for case in cases:
        if not case.reference(folder).exists():
            if not case.saved(folder).exists():
                _save(case.saved(folder), case.model)
            for twin in range(NUM_TWINS + 1):
                _trace_reference(case, folder, twin)


def run_case(case: Case, folder: Path, change: Change | None = None) -> Judgement | None:
    """On every rank: trace the candidate, and judge it on rank 0."""
    model = distributed(case, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = folder / f"{case}{'-changed' if change else ''}"
    plan = planned(out=out, role="candidate", reference=case.reference(folder) / "reference")
    with change(model) if change else nullcontext():
        train(attached(plan, model, optimizer), model, optimizer, case.num_accumulated)
    dist.barrier()
    return judge(case.reference(folder), out) if dist.get_rank() == 0 else None


def changed_by_recording(case: Case, folder: Path) -> list[str]:
    """The parameters that differ after a step with a session from those after a step without."""
    ends = []
    for recording in (False, True):
        model = distributed(case, folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = planned(out=folder / f"{case}-neutral", parameters="own")
        session: Any = attached(plan, model, optimizer) if recording else DisabledSession()
        session.batch = lambda batch: batch
        torch.manual_seed(dist.get_rank())
        train(session, model, optimizer, case.num_accumulated)
        ends.append({name: _local(p).clone() for name, p in model.named_parameters()})
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


def distributed(case: Case, folder: Path) -> nn.Module:
    """The model as transformers distributes it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(**case.config)
    model: Any = AutoModelForCausalLM.from_pretrained(case.saved(folder), distributed_config=config)
    if case.experts:
        model.set_experts_implementation(case.experts)
    found: nn.Module = model.train()
    return found


def attached(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Session:
    """What `ttrace run` does to a script, for one that is already running."""
    path = plan.out.with_suffix(f".{dist.get_rank()}.json")
    plan.save(path)
    os.environ[PLAN_VARIABLE] = str(path)
    try:
        return ttrace.attach(model, optimizer)
    finally:
        del os.environ[PLAN_VARIABLE]


def train(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, num_microbatches: int) -> None:
    """One step of next-token training, with the loss that the model computes itself."""
    with session.step():
        for _ in range(num_microbatches):
            ids = torch.randint(VOCAB, (2, BATCH, LENGTH))
            batch = session.batch({"input_ids": ids[0], "labels": ids[1]})
            (model(**batch).loss / num_microbatches).backward()
        optimizer.step()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _trace_reference(case: Case, into: Path, twin: int) -> None:
    from transformers import AutoModelForCausalLM

    folder = case.reference(into)
    model = AutoModelForCausalLM.from_pretrained(case.saved(into)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = planned(out=folder / "reference", microbatch_grads=case.microbatch_grads)
    if twin:
        known = {"role": "twin", "twin": twin, "reference": folder / "reference"}
        plan = plan.model_copy(update={"out": folder / f"twin-{twin}", **known})
    train(attached(plan, model, optimizer), model, optimizer, case.num_microbatches)


def _save(folder: Path, model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model, **CONFIGS[model])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]  # transformers' own
