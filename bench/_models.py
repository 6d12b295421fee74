"""Small models, and candidates that differ from them by rounding alone, all in one process.

A parallelism changes a clean model in one way only: sums are taken in parts, each rounded before they are added. Tensor
parallelism cuts the summed dim of a product, forward and backward; data and context parallelism cut the tokens over
which a weight's gradient is summed; ring attention also cuts the keys. `Cut` says into how many parts, and `divided`
makes a model compute so. Pipelining changes no sum at all.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ttrace.capture.parts import SessionParts
from ttrace.capture.plan import Plan
from ttrace.capture.session import TracingSession
from ttrace.judge.tolerance.model import ToleranceModel
from ttrace.trace.reader import Trace
from zoo.harness.gpt import Gpt
from zoo.harness.runs import SimulatedRank
from zoo.harness.transformer import Attention, Experts, Shape, Transformer

VOCAB, LENGTH, BATCH = 61, 12, 2
NUM_TWINS = 3
FAMILIES = ("gpt", "llama", "moe")
PRECISIONS = ("fp32", "bf16", "fp8")
"""fp8 is torchao's dynamic float8 recipe with one scale per tensor, stored and accumulated in bf16."""


@dataclass(frozen=True)
class Cut:
    """Into how many parts sums are taken: over inputs and outputs of a product, over tokens, over keys."""

    inner: int = 1
    tokens: int = 1
    keys: int = 1


CUTS = {
    "tp=2": Cut(inner=2),
    "tp=4": Cut(inner=4),
    "dp=2": Cut(tokens=2),
    "cp=2": Cut(tokens=2, keys=2),
    "tp=2 cp=2": Cut(inner=2, tokens=2, keys=2),
}
FEW = {name: CUTS[name] for name in ("tp=2", "tp=4", "tp=2 cp=2")}
"""Those that change most tensors, for where all would take too long; every sum is in parts in one of them."""


def widened(shape: Shape) -> Shape:
    """With sums as long as those of real models."""
    return replace(shape, vocab=16384, hidden=256, ffn=1024)


@dataclass(frozen=True)
class Model:
    """What to build: a family, how deep, and in which precision."""

    family: str
    precision: str
    num_layers: int
    seed: int = 0
    is_wide: bool = False
    """Whether its sums are as long as those of real models; not of gpt."""

    @property
    def name(self) -> str:
        return f"{self.family} {self.precision} {self.num_layers}{' wide' if self.is_wide else ''}"

    def build(self, cut: Cut | None = None) -> nn.Module:
        """The model, computing in parts if `cut` says so."""
        torch.manual_seed(self.seed)
        if self.family == "gpt":
            model: nn.Module = Gpt(num_layers=self.num_layers)
        else:
            experts = 4 if self.family == "moe" else 0
            shape = Shape(VOCAB, num_layers=self.num_layers, length=LENGTH, experts=experts, tied=False)
            if self.is_wide:
                shape = widened(shape)
            model = Transformer(shape)
        model = model.to(torch.float32 if self.precision == "fp32" else torch.bfloat16)
        if cut is not None or self.precision == "fp8":
            divide(model, cut or Cut(), cast_to_float8 if self.precision == "fp8" else None)
        return model


Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
Change = Callable[[nn.Module], None]
"""Something done to a candidate: before it trains, or between its last backward and its optimizer's step."""


def cast_to_float8(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded as torchao does it, emulated: back in the dtype it came in."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about every CUDA library that is missing
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    rounded: torch.Tensor = hp_tensor_to_float8_dynamic(tensor, dtype, LinearMMConfig()).to_original_precision()
    return rounded


def divide(model: nn.Module, cut: Cut, cast: Cast | None = None) -> None:
    """Make every product of activations and weights, and with `keys` the attention, compute in parts."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            # The head stays in the model's precision, as float8 recipes have it.
            is_head = name in ("head", "output")
            module.forward = partial(_linear, module, cut, None if is_head else cast)  # type: ignore[method-assign]
        elif isinstance(module, Experts):
            module.forward = partial(_experts, module, cut, cast)  # type: ignore[method-assign]
        elif isinstance(module, Attention) and cut.keys > 1:
            module.attend = partial(_ring, cut.keys)


def _linear(
    module: nn.Linear, cut: Cut, cast: Cast | None, x: torch.Tensor, *, product: type[_Product] | None = None
) -> torch.Tensor:
    y: torch.Tensor = (product or _Product).apply(x, module.weight, cut, cast)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias


def _experts(module: Experts, cut: Cut, cast: Cast | None, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, w.t(), cut, cast)  # type: ignore[no-untyped-call]
        return y

    weights = zip(module.w1.unbind(), module.w2.unbind(), module.w3.unbind(), strict=True)
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([product(F.silu(product(x, w1)) * product(x, w3), w2) for x, (w1, w2, w3) in parts])


class _Product(torch.autograd.Function):
    """x @ w.T with every sum taken in parts, each of which is rounded to the dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, cut: Cut, cast: Cast | None) -> torch.Tensor:
        if cast is not None and x.numel():
            x, w = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        ctx.cut, ctx.cast = cut, cast
        parts = zip(x.chunk(cut.inner, -1), w.chunk(cut.inner, -1), strict=True)
        return _added([F.linear(a, b) for a, b in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (x, w), cut, dy = ctx.saved_tensors, ctx.cut, grads[0]
        if ctx.cast is not None and dy.numel():
            dy = ctx.cast(dy, torch.float8_e5m2)
        dx = _added([a @ b for a, b in zip(dy.chunk(cut.inner, -1), w.chunk(cut.inner, 0), strict=True)])
        rows = zip(*(t.flatten(0, -2).chunk(cut.tokens) for t in (dy, x)), strict=True)
        return dx, _added([a.t() @ b for a, b in rows]), None, None


class _Unreduced(_Product):
    """The same without the sum of the input's gradient in backward: the part of the first rank is passed on."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        _, dw, *_ = _Product.backward(ctx, *grads)
        return grads[0].chunk(2, -1)[0] @ ctx.saved_tensors[1].chunk(2, 0)[0], dw, None, None


def forget_reductions(model: nn.Module) -> None:
    """No layer's attention sums its input's gradient over the heads' two ranks, as tensor parallelism must."""
    for name, module in model.named_modules():
        if name.endswith(("wq", "wk", "wv")) and isinstance(module, nn.Linear):
            module.forward = partial(_linear, module, Cut(inner=2), None, product=_Unreduced)  # type: ignore[method-assign]


def shift_vocabulary(model: nn.Module) -> None:
    """The second of two vocabulary shards looks its words up one row too early."""
    table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    first = table.num_embeddings // 2

    def looked_up(ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(torch.where(ids > first, ids - 1, ids), table.weight)

    table.forward = looked_up  # type: ignore[assignment, method-assign]


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _ring(num: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over keys in parts, merged by their log-sum-exp in float32 as ring attention does."""
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    places = torch.arange(length)
    outs, sums = [], []
    for keys, values, at in zip(k.chunk(num, 2), v.chunk(num, 2), places.chunk(num), strict=True):
        scores = (q.float() @ keys.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(at > places[:, None], -1e30)
        outs.append((scores.softmax(-1) @ values.float()).to(q.dtype).float())
        sums.append(scores.logsumexp(-1, keepdim=True))
    weights = torch.stack(sums).softmax(0)
    return (torch.stack(outs) * weights).sum(0).to(q.dtype)


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def train(plan: Plan, model: nn.Module, change: Change | None = None, *, backward: float = 1.0) -> None:
    """Trace one step of next-token training over two microbatches; `change` is done before the optimizer steps.

    `backward` multiplies what enters the model's backward.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = TracingSession(SessionParts(plan, model, optimizer, SimulatedRank()))
    vocab = next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    with session.step():
        for _ in range(2):
            batch = {"ids": torch.randint(vocab, (BATCH, LENGTH)), "labels": torch.randint(vocab, (BATCH, LENGTH))}
            batch = session.batch(batch)
            logits = _ScaledBackward.apply(model(batch["ids"]).float(), backward)  # type: ignore[no-untyped-call]
            (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 2).backward()
        if change is not None:
            change(model)
        optimizer.step()


@dataclass(frozen=True)
class Bed:
    """The trace of a reference and its tolerances; candidates are compared with both."""

    model: Model
    folder: Path
    twins: ToleranceModel

    def candidate(
        self, cut: Cut | None, change: Change | None = None, *, backward: float = 1.0, broken: Change | None = None
    ) -> Trace:
        """The trace of a candidate that computes in parts; the rest makes it wrong, as in `train` or before it."""
        out = self.folder / "candidate"
        shutil.rmtree(out, ignore_errors=True)
        plan = Plan(out=out, role="candidate", reference=self.folder / "reference", seed=self.model.seed, stop=False)
        model = self.model.build(cut)
        if broken is not None:
            broken(model)
        train(plan, model, change, backward=backward)
        return Trace(out)


@contextmanager
def bed(model: Model) -> Iterator[Bed]:
    """Trace a reference and its twins."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = Plan(out=folder / "reference", seed=model.seed, stop=False)
        train(plan, model.build())
        twins = []
        for twin in range(1, NUM_TWINS + 1):
            update = {"out": folder / f"twin-{twin}", "role": "twin", "twin": twin, "reference": folder / "reference"}
            train(plan.model_copy(update=update), model.build())
            twins.append(Trace(folder / f"twin-{twin}"))
        yield Bed(model, folder, ToleranceModel.measure(Trace(folder / "reference"), twins))
