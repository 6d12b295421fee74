"""An artificial run: many small tensors, a reference with a twin, a candidate on two ranks."""

from __future__ import annotations

import torch

from ttrace.layouts.ids import TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.placement import LayoutSource, Provenance
from ttrace.trace.format import End, Manifest, ModuleInfo, Record
from ttrace.trace.store import Place
from ttrace.trace.writer import Writer

_KINDS = {
    "output": "t h/tp",
    "grad_output": "t/tp h",
    "param": "t h/tp",
    "param_grad": "t h/tp",
    "param_after": "t h/tp",
}


def write_run(folder: Place, num_tensors: int, shape: tuple[int, int], *, wrong: int | None = None) -> None:
    """About so many tensors in each trace; the candidate's output of the layer `wrong` is off by a tenth."""
    num_layers = num_tensors // len(_KINDS)
    _write(folder / "reference", "reference", 1, num_layers, shape, 0.0)
    _write(folder / "twin-1", "twin", 1, num_layers, shape, 1e-6)
    _write(folder / "candidate", "candidate", 2, num_layers, shape, 3e-7, wrong)


def _write(
    folder: Place,
    role: str,
    num_ranks: int,
    num_layers: int,
    shape: tuple[int, int],
    error: float,
    wrong: int | None = None,
) -> None:
    mesh = Mesh.of(tp=num_ranks) if num_ranks > 1 else Mesh()
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    for rank in range(num_ranks):
        manifest = Manifest(
            role=role,
            rank=rank,
            num_ranks=num_ranks,
            mesh=str(mesh),
            seed=0,
            modules={name: ModuleInfo(type="Layer") for name in layers},
            parameters={f"{name}.weight": True for name in layers},
        )
        writer = Writer(folder, manifest)
        chance, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        for number, name in enumerate(layers):
            weight = torch.randn(shape, generator=chance)
            for kind, layout in _KINDS.items():
                data = (
                    weight
                    if kind.startswith("param") and kind != "param_grad"
                    else torch.randn(shape, generator=chance)
                )
                data = data + 1e-3 if kind == "param_after" else data
                if kind != "param":
                    data = data * (1 + error * torch.randn(shape, generator=noise))
                if number == wrong and kind == "output":
                    data = data * (1 + 0.1 * torch.randn(shape, generator=noise))
                text = f"0/-/{name}.weight/{kind}" if kind.startswith("param") else f"0/0/{name}/{kind}"
                region = Layout.parse(layout).region(shape, {"tp": num_ranks}, mesh.coord(rank))
                part = region.take(data).contiguous()
                stated = layout if num_ranks > 1 else "t h"
                record = Record(
                    TensorId.parse(text),
                    tuple(part.shape),
                    part.dtype,
                    region,
                    layout=stated,
                    by=Provenance(LayoutSource.RULE, "bench"),
                )
                writer.write(record, part)
        writer.close(End(num_steps=1))
