"""Check of a tensor-parallel candidate, clean and with a missing all-reduce, against a streamed reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import ttrace
from bench._large import Large
from ttrace.adapters.native.adapter import Native
from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.verdict import Judgement
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks
from zoo.harness.runs import NUM_TWINS, judge

NUM_RANKS, BATCH, LENGTH = 2, 2, 16
DROPPED = "model.layers.1.mlp.down_proj"
"""The module whose output stays a partial sum in the wrong candidate."""
TIMEOUT = HANG


def judged_on_ranks(large: Large, folder: Path) -> dict[str, Judgement]:
    """The clean candidate and the wrong one, judged against a streamed reference and its twins."""
    build = large.build
    for twin in range(NUM_TWINS + 1):
        known: dict[str, Any] = {"role": "twin", "twin": twin, "reference": folder / "reference"} if twin else {}
        out = folder / (f"twin-{twin}" if twin else "reference")
        _step(Plan(out=out, stop=False, **known), ttrace.streamed(build), large.vocab)
    saved: Any = build()
    saved.save_pretrained(folder / "saved")
    del saved
    on_ranks(NUM_RANKS, _candidates, large, folder, timeout=TIMEOUT)
    return {name: judge(folder, folder / name) for name in ("clean", "wrong")}


def _candidates(large: Large, folder: Path) -> None:
    """On every rank."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    auto: Any = transformers.AutoModelForCausalLM  # it has no types
    for name in ("clean", "wrong"):
        config = DistributedConfig(tp_size=NUM_RANKS, tp_plan="auto")
        model = auto.from_pretrained(folder / "saved", distributed_config=config).train()
        plan = Plan(out=folder / name, role="candidate", reference=folder / "reference", stop=False)
        with _unreduced(model if name == "wrong" else None):
            _step(plan, model, large.vocab)


def _step(plan: Plan, model: nn.Module, vocab: int) -> None:
    session = TracingSession(SessionParts(plan, model, None, Native([model])))
    with session.step():
        ids, labels = torch.randint(vocab, (2, BATCH, LENGTH))
        model(**session.batch({"input_ids": ids, "labels": labels})).loss.backward()


@contextmanager
def _unreduced(model: nn.Module | None) -> Iterator[None]:
    """One module's output is not summed over ranks."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    if model is None:
        yield
        return
    style: Any = ALL_PARALLEL_STYLES["rowwise"]
    target, right = model.get_submodule(DROPPED), style.transform_output_post_forward

    def wrong(module: nn.Module, output: Any, *args: Any, **kwargs: Any) -> Any:
        if module is not target:
            return right(module, output, *args, **kwargs)
        return output.to_local() if isinstance(output, DTensor) else output

    style.transform_output_post_forward = wrong
    try:
        yield
    finally:
        del style.transform_output_post_forward
