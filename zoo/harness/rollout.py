"""The case of entries about inference: one forward pass as the reference, generation with a cache as the candidate.

Both run in the launching process, as transformers does them. A patch changes the rollout before it generates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from zoo.bug import Judge, Launcher
from zoo.harness.cells import Traced
from zoo.harness.plans import planned
from zoo.harness.runs import NUM_TWINS, SimulatedRank
from zoo.launch import Sided, patched
from zoo.seen import Seen

VOCAB, PROMPT, LENGTH, PADDING = 64, 9, 16, 3


class LogProbs(nn.Module):
    """The log-probabilities of tokens, from the logits before them."""

    def forward(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


class Rollout:
    """A small model and how it generates. What is done to logits, tokens and masks may be replaced."""

    def __init__(self, case: Generated) -> None:
        import transformers

        config = transformers.MistralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=case.window,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        untyped: Any = transformers
        self.case = case
        self.model: Any = untyped.MistralForCausalLM(config)
        self.logprobs = LogProbs()
        self.policy = nn.ModuleDict({"model": self.model, "logprobs": self.logprobs}).eval()
        self.change_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
        self.change_mask: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask
        self.choose: Callable[[torch.Tensor, int], torch.Tensor] = lambda tokens, place: tokens[:, place]

    def train(self, tokens: torch.Tensor) -> None:
        """Score all tokens in one call, as a trainer does."""
        mask = _make_mask(tokens)
        given = {"attention_mask": mask[:, :-1], "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, :-1]}
        logits = self.model(tokens[:, :-1], **given, logits_to_keep=LENGTH - PROMPT, use_cache=False).logits
        self.logprobs(logits, tokens[:, PROMPT:])

    def generate(self, tokens: torch.Tensor) -> None:
        """Generate the same tokens one after the other."""

        def force(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            self.logprobs(self.change_logits(logits)[:, None], self.choose(tokens, ids.shape[1])[:, None])
            return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, ids.shape[1], None], 0.0)

        self.model.generate(
            tokens[:, :PROMPT],
            attention_mask=self.change_mask(_make_mask(tokens)[:, :PROMPT]),
            logits_processor=[force],
            max_new_tokens=LENGTH - PROMPT,
            do_sample=False,
            prefill_chunk_size=self.case.chunk,
        )


@dataclass(frozen=True)
class Generated:
    """How tokens are generated: the window of attention, and the size of the chunks that fill the cache, if any."""

    window: int | None = None
    chunk: int | None = None
    num_ranks: int = 1

    @property
    def launcher(self) -> Launcher:
        return on_rollouts


def on_rollouts(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:  # noqa: ARG001
    """The launcher of rollouts: they need no ranks."""
    kept = []
    for run in runs:
        begin, out = time.monotonic(), folder / str(run)
        case = cast(Generated, run.case)
        _trace(case, planned(out=out / "reference", forward_only=True))
        for twin in range(1, NUM_TWINS + 1):
            known = {"role": "twin", "twin": twin, "reference": out / "reference"}
            _trace(case, planned(out=out / f"twin-{twin}", forward_only=True).model_copy(update=known))
        plan = planned(out=out / "candidate", forward_only=True, role="candidate", reference=out / "reference")
        _trace(case, plan, run)
        kept.append(replace(judge(Traced(out, out / "candidate")), seconds=time.monotonic() - begin))
    return kept


def _trace(case: Generated, plan: Plan, run: Sided | None = None) -> None:
    rollout = Rollout(case)
    session = TracingSession(SessionParts(plan, rollout.policy, None, SimulatedRank()))
    with patched(run.patch if run is not None else None, rollout), session.step(), torch.no_grad():
        tokens = session.batch({"ids": torch.randint(VOCAB, (2, LENGTH))})["ids"]
        (rollout.train if run is None else rollout.generate)(tokens)
    session.close()


def _make_mask(tokens: torch.Tensor) -> torch.Tensor:
    """The second prompt is shorter, and padded on the left."""
    mask = torch.ones_like(tokens)
    mask[1, :PADDING] = 0
    return mask
