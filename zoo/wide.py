"""Controls and bugs at the widths of models that people train: one to twelve layers of them, on two ranks.

The largest take 20 GB of memory: both ranks train a whole twin at a time.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ttrace.judge.verdict import Exit
from zoo.bug import Bug, Case, Judge, Patch, bugs
from zoo.harness.candidate import Cell
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks
from zoo.harness.small import Small
from zoo.harness.transformer import Attention, Block, Shape, causal
from zoo.launch import Sided, by_ttrace, seen, trace_all
from zoo.seen import Seen

ROOT = Path(__file__).parents[1]
MEASURED, PAGE = ROOT / "docs" / "measured" / "wide.json", ROOT / "docs" / "reference" / "wide.md"
NUM_BUGS = 20


class LatentAttention(nn.Module):
    """DeepSeek's attention: keys and values come from a common vector of low rank."""

    def __init__(self, like: Attention) -> None:
        super().__init__()
        hidden = like.wq.in_features
        self.head, rank = like.head, hidden // 4
        self.wq, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.down, self.norm = nn.Linear(hidden, rank, bias=False), nn.RMSNorm(rank)
        self.up = nn.Linear(rank, 2 * hidden, bias=False)

    def forward(self, x: torch.Tensor, _rope: torch.Tensor) -> torch.Tensor:
        q, kv = self.wq(x), self.up(self.norm(self.down(x)))
        b, t, _ = q.shape
        q, k, v = (p.reshape(b, t, -1, self.head).transpose(1, 2) for p in (q, *kv.chunk(2, -1)))
        out: torch.Tensor = self.wo(causal(q, k, v).transpose(1, 2).reshape(b, t, -1))
        return out


def use_latent_attention(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, Block):
            module.attention = LatentAttention(module.attention)  # type: ignore[assignment]  # it stands in for it


GPT2 = Shape(vocab=50304, hidden=768, heads=12, kv_heads=12, ffn=2048, num_layers=12, length=128)
LLAMA = Shape(vocab=128256, hidden=4096, heads=32, kv_heads=8, ffn=14336, num_layers=1, length=32)
QWEN = Shape(vocab=151936, hidden=896, heads=14, kv_heads=2, ffn=4864, num_layers=2, length=64)
MOE = Shape(vocab=8192, hidden=2048, heads=32, kv_heads=4, ffn=768, num_layers=1, length=64, experts=64)
LATENT = Shape(vocab=32768, hidden=2048, heads=16, kv_heads=16, ffn=5632, num_layers=2, length=64)
LONG = Shape(vocab=8192, hidden=1024, heads=16, kv_heads=8, ffn=2816, num_layers=2, length=2048)
F32, BF16 = torch.float32, torch.bfloat16
CELLS: Mapping[str, tuple[Shape, Sequence[tuple[str, torch.dtype]], str]] = {
    "gpt2-124m": (
        GPT2,
        [(layout, F32) for layout in ("fsdp", "ddp", "zero", "tp", "tp+sp", "tp+loss", "cp-ring", "pp-1f1b")],
        "auto",
    ),
    "qwen2.5-0.5b": (
        QWEN,
        [(layout, dtype) for dtype in (F32, BF16) for layout in ("fsdp", "tp+sp", "tp+loss", "cp-gather")],
        "auto",
    ),
    "qwen3-moe": (
        MOE,
        [("ep", F32), ("moe+fsdp", F32), ("moe+ddp", F32), ("ep", BF16), ("moe+fsdp", BF16)],
        "auto",
    ),
    "latent-attention": (
        replace(LATENT, adapt=use_latent_attention),
        [("fsdp", F32), ("ddp", F32), ("pp-1f1b", F32), ("fsdp", BF16)],
        "auto",
    ),
    "sequence-2048": (LONG, [("fsdp", F32), ("tp+sp", F32), ("cp-ring", F32), ("cp-ulysses", F32)], "auto"),
    "llama-3-8b": (LLAMA, [("tp+sp", BF16), ("fsdp", BF16), ("cp-gather", BF16)], "sketch"),
}
"""By name: the model, its layouts, and what is recorded."""
BUGS = (
    "bucket-boundary-not-reduced",
    "checkpoint-matched-by-position",
    "checkpoint-norms-swapped",
    "checkpoint-stage-local-layers",
    "cp-keys-gathered-along-heads",
    "cp-left-out-of-divisor",
    "cp-model-not-wrapped",
    "cp-positions-not-cut",
    "embedding-first-of-shard",
    "embedding-mask-rebased",
    "expert-gradients-not-divided",
    "last-microbatch-after-reduction",
    "mesh-of-one-not-reduced",
    "optimizer-keeps-old-parameters",
    "pp-layer-dropped",
    "pp-scaled-at-every-stage",
    "sp-norm-averaged",
    "sp-norm-not-summed",
    "tp-norm-gradient-summed",
    "ulysses-heads-scrambled",
    "zero-update-not-gathered",
)
"""Entries of the zoo that are planted again."""
BROKEN = replace(GPT2, vocab=16384, kv_heads=6, num_layers=4, length=32)


def on_torch_alone(num_ranks: int, runs: Sequence[Sided], folder: Path, judge: Judge) -> list[Seen]:
    """The launcher: one run is judged before the next one begins, as traces of large models fill the disk."""
    timeout = HANG * len(runs)
    kept: list[Seen] = on_ranks(num_ranks, trace_all, runs, folder, judge, 1, timeout=timeout)[0]
    return kept


@dataclass(frozen=True)
class Wide:
    """A run by name; ranks look it up."""

    name: str

    @property
    def case(self) -> Case:
        return _known()[self.name][0]

    @property
    def patch(self) -> Patch | None:
        bug = self.bug
        return bug.patch if bug is not None else None

    @property
    def is_early(self) -> bool:
        bug = self.bug
        return bug is not None and bug.is_early

    @property
    def bug(self) -> Bug | None:
        """The entry that is planted here."""
        return _known()[self.name][1]

    def is_right(self, found: Seen) -> bool:
        """Whether the verdict is, and the module and cause are as at the usual size."""
        if self.bug is None:
            return found.exit is Exit.PASSED
        return self.bug.expected.is_met_by(found)

    def __str__(self) -> str:
        return self.name


@functools.cache
def _known() -> dict[str, tuple[Small, Bug | None]]:
    found: dict[str, tuple[Small, Bug | None]] = {name: (case, None) for name, case in _list_controls()}
    for name in BUGS:
        bug = bugs()[name]
        assert isinstance(bug.case, Small)
        cell = replace(bug.case.cell, record="full")
        found[name] = replace(bug.case, cell=cell, shape=BROKEN, launcher=on_torch_alone), bug
    return found


def _list_controls() -> Iterator[tuple[str, Small]]:
    for name, (shape, layouts, record) in CELLS.items():
        for layout, dtype in layouts:
            num = 4 if layout.startswith("pp") else 2
            cell = Cell(layout, 2, dtype, num_microbatches=num, record=record)
            text = f"{name}-{layout}-{str(dtype).removeprefix('torch.')}"
            yield text, Small(cell, shape, launcher=on_torch_alone)


def evaluate_wide(only: Sequence[str], tell: Callable[[str], None]) -> int:
    """Run all, or those whose names begin so; write what was found, and return the exit code."""
    chosen = [Wide(name) for name in _known() if not only or name.startswith(tuple(only))]
    begin = time.monotonic()
    found: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, together in _group(chosen).items():
            tell(key)
            for run, one in seen(together, Path(folder) / key, judge=by_ttrace).items():
                found[run.name] = one
                tell(
                    f"{run}: {'as expected' if run.is_right(one) else (one.module, one.kind, one.cause, *one.trouble)}"
                )
            _write(found)
    controls = [name for name in found if Wide(name).bug is None]
    accused = [name for name in controls if not Wide(name).is_right(found[name])]
    planted = [name for name in found if Wide(name).bug is not None]
    detected = [name for name in planted if found[name].exit is Exit.FOUND]
    right = [name for name in planted if Wide(name).is_right(found[name])]
    print(
        f"{len(controls)} controls at real width, {len(accused)} accused; {len(planted)} bugs, {len(detected)} "
        f"detected, {len(right)} with the module and cause of the small model; {time.monotonic() - begin:.0f} s"
    )
    return 0 if not accused and len(right) == len(planted) else 1


def _group(chosen: Sequence[Wide]) -> dict[str, list[Wide]]:
    """Group runs that share a reference's model: its traces are removed before the next model is traced."""
    groups: dict[str, list[Wide]] = {}
    for run in chosen:
        name = next((name for name in CELLS if run.name.startswith(name)), "bugs")
        groups.setdefault(name, []).append(run)
    return groups


def _write(found: Mapping[str, Seen]) -> None:
    """Write the results, beside those of earlier runs of other names."""
    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for name, one in found.items():
        known[name] = {
            "exit": one.exit.name.lower(),
            "as expected": Wide(name).is_right(one),
            "tensors": one.num_tensors,
            "found": f"{one.module}/{one.kind}: {one.cause}" if one.cause else "",
            "seconds": round(one.seconds),
        }
    known = {name: known[name] for name in _known() if name in known}
    MEASURED.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(make_page(known))


def make_page(known: Mapping[str, Mapping[str, object]]) -> str:
    """Make the page of what was measured."""
    lines = [
        "# Real widths",
        "",
        "Controls and bugs of the zoo at the widths of models that people train, on two ranks, as measured by",
        "`python -m zoo evaluate --wide`, which writes this page. A control must pass. A bug must be found in the",
        "module and with the cause that it has in a small model.",
        "",
        "| run | verdict | found | tensors | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, one in known.items():
        verdict = one["exit"] if one["as expected"] else f"**{one['exit']}, not as expected**"
        lines.append(f"| {name} | {verdict} | {one['found']} | {one['tensors']} | {one['seconds']} |")
    return "\n".join(lines) + "\n"
