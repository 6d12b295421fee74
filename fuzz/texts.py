"""Texts that people write: notation, ids, meshes and expressions; files of rules, plans, sweeps and the like."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutation import mutate_json_text, mutate_text
from fuzz.target import Mutate, Target
from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.policy import Baseline, Policy
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Judgement, Verdict
from ttrace.layouts.ids import Kind, Site, TensorId, encode_name
from ttrace.layouts.layout import Layout
from ttrace.layouts.mesh import Mesh
from ttrace.layouts.rules import Rules
from ttrace.layouts.splits import Split
from ttrace.trace.seal import seal_document
from ttrace.workflow.sweeps.failure_condition import Value, evaluate
from ttrace.workflow.sweeps.sweep_file import Matrix

_SITES = (Site("layers.0.fc1", Kind.OUTPUT), Site("a", Kind.PARAM_GRAD), Site(".", Kind.OPTIM, "a.b"))
_MESH = Mesh.parse("pp=2 tp=4 | pp=2 ep=4")
_NAMES: dict[str, Value] = {"tp": 2, "cp": 4, "x": "gpipe", "fp8": True, "lr": 0.5}
_WRONG = Comparison(TensorId.parse("0/0/layers.0.fc1/output"), Verdict.FAIL)
_JUDGEMENT = Judgement((_WRONG,), (Finding(_WRONG, "a", "a.py:1", Cause(CauseName.ZEROS, "zeros"), 1),), ())


def _decode(data: bytes) -> str:
    """Decode as Python decodes arguments of a command: bytes that are no text become halves of pairs."""
    return data.decode("utf-8", "surrogateescape")


def _run_notation(data: bytes) -> None:
    text = _decode(data)
    _try(_cut, text)
    layout = Layout.parse(text)
    if Layout.parse(str(layout)) != layout:
        raise AssertionError("the layout's own text is another layout")
    sizes = dict(zip(sorted(layout.axes), (2, 3, 2, 4), strict=False))
    for shape in ((), (8,), (6, 24), (24, 5, 12)):
        _try(_place, layout, shape, sizes)


def _cut(text: str) -> None:
    Split.parse(text).ranges(24, 1, 4)


def _place(layout: Layout, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    last = {axis: size - 1 for axis, size in sizes.items()}
    region = layout.region(shape, sizes, last)
    layout.global_shape(region.local_shape, sizes)
    layout.local_shape(shape, sizes, last)
    layout.coverage(shape, sizes)


def _run_id(data: bytes) -> None:
    text = _decode(data)
    if text:
        Site(encode_name(text[:50]), Kind.OUTPUT)
    tensor_id = TensorId.parse(text)
    if TensorId.parse(str(tensor_id)) != tensor_id:
        raise AssertionError("the id's own text is another id")


def _run_mesh(data: bytes) -> None:
    mesh = Mesh.parse(_decode(data))
    if Mesh.parse(str(mesh)) != mesh:
        raise AssertionError("the mesh's own text is another mesh")
    for rank in (0, mesh.num_ranks - 1, mesh.num_ranks):
        _try(mesh.coord, rank)
    mesh.check_one_factorisation(frozenset({"tp", "pp"}))


def _run_expression(data: bytes) -> None:
    evaluate(_decode(data), _NAMES)


def _run_rules(path: Path) -> None:
    rules = Rules.of(path)
    for site in _SITES:
        rules.decide(site)
    [str(rule) for rule in rules.list_unused()]
    rules.check(_MESH)


def _run_plan(path: Path) -> None:
    _try(Plan.load, path)
    path.write_bytes(_seal(path.read_bytes()))
    plan = Plan.load(path)
    for site in _SITES:
        plan.wants(site), plan.keeps_full(site)
    _ = plan.written, plan.trusted, plan.measured, plan.claim, plan.end_step
    _try(Mesh.parse, plan.mesh)
    Rules.of(plan.rules).check(_MESH)


def _seal(data: bytes) -> bytes:
    """Seal a document as it is, whatever it holds."""
    try:
        return seal_document(data.decode()).encode()
    except (UnicodeDecodeError, AssertionError):  # nothing to seal
        return data


def _run_sweep_file(path: Path) -> None:
    for cell in Matrix.load(path).cells:
        _ = cell.name, cell.folder


def _run_policy(path: Path) -> None:
    Policy.load(path).apply((_WRONG,))


def _run_baseline(path: Path) -> None:
    baseline = Baseline.load(path)
    baseline.exit(_JUDGEMENT)
    baseline.add_notes(_JUDGEMENT)


def _try(action: Callable[..., object], *arguments: Any) -> None:
    """Do something that may be refused, and go on."""
    with suppress(TTraceError):
        action(*arguments)


def _write_first(run: Callable[[Path], None]) -> Callable[[bytes], None]:
    """Return a target that writes its input to a file, which `run` reads."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "input"

    def write_and_run(data: bytes, _folder: tempfile.TemporaryDirectory[str] = folder) -> None:
        path.write_bytes(data)
        run(path)

    return write_and_run


def _change_words(words: tuple[str, ...]) -> Mutate:
    def change(data: bytes, random: Random) -> bytes:
        return mutate_text(_decode(data), words, random).encode("utf-8", "surrogatepass")

    return change


_LAYOUT_WORDS = (
    *("batch", "seq", "hidden", "tp", "cp", "/", ":", "+", " ", "...", "zigzag", "block", "fused(2)", "fused(4,1,1)"),
    *("padded", "padded(128)", "striped(3)", "balanced", "(", ")", ",", "0", "1", "mb", "=", "|"),
)
_ID_WORDS = ("/", "@", "%2F", "-", "0", "1", ".", " ", "layers.0.fc1", *(kind.value for kind in Kind))
_MESH_WORDS = ("pp=2", "tp=4", "ep=8", "=", "|", " ", "mb=2", "dp", "1", "0", "\u00b2", "\u0663")
_EXPRESSION_WORDS = (
    *(
        "tp",
        "cp",
        "x",
        "fp8",
        "lr",
        " and ",
        " or ",
        "not ",
        " in ",
        " not in ",
        " is ",
        "==",
        "!=",
        "<",
        ">=",
        "+",
        "-",
    ),
    *(
        "*",
        "//",
        "%",
        "/",
        "**",
        "(",
        ")",
        "[",
        "]",
        ",",
        "'gpipe'",
        '"',
        "1",
        "0",
        "0.5",
        "1e308",
        "True",
        "None",
        "~",
    ),
    *("lambda:", "f''", "a.b", "a[0]", "if", "else", "for", "0x", "\\"),
)
_TOML_WORDS = (
    *(
        "[",
        "]",
        "[[",
        "]]",
        "=",
        '"',
        "'",
        "'''",
        '"""',
        "\n",
        ".",
        "#",
        "{",
        "}",
        ",",
        "true",
        "1",
        "0x",
        "inf",
        "nan",
    ),
    *("2027-01-31", "12:00:00", "1979-05-27T07:32:00Z", "\\u0041", "\\x", "* ", "?", "[!a]", "[z-a]", "**"),
)
_RULES_WORDS = (*_TOML_WORDS, "[layouts]\n", '"*.fc1/output"', '"batch hidden/tp"', *_LAYOUT_WORDS)
_SWEEP_WORDS = (
    *(*_TOML_WORDS, "[axes]\n", "[derived]\n", "exclude", "reference", "candidate", "{tp}", "{", "[1, 2]", "ranks"),
    *_EXPRESSION_WORDS,
)
_POLICY_WORDS = (*_TOML_WORDS, "[[allow]]\n", "site", "reason", "until", "2099-01-31", "9999-12-31")

TARGETS = (
    Target("notation", _run_notation, _change_words(_LAYOUT_WORDS), _LAYOUT_WORDS),
    Target("ids", _run_id, _change_words(_ID_WORDS), _ID_WORDS),
    Target("mesh", _run_mesh, _change_words(_MESH_WORDS), _MESH_WORDS),
    Target("expression", _run_expression, _change_words(_EXPRESSION_WORDS), _EXPRESSION_WORDS),
    Target("rules", _write_first(_run_rules), _change_words(_RULES_WORDS), _RULES_WORDS, usual_bytes=600),
    Target("plan", _write_first(_run_plan), mutate_json_text, usual_bytes=6000),
    Target("sweep-file", _write_first(_run_sweep_file), _change_words(_SWEEP_WORDS), _SWEEP_WORDS, usual_bytes=600),
    Target("policy", _write_first(_run_policy), _change_words(_POLICY_WORDS), _POLICY_WORDS, usual_bytes=600),
    Target("baseline", _write_first(_run_baseline), mutate_json_text, usual_bytes=1000),
)
