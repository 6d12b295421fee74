"""transformers models, attached with no annotation: clean runs pass, and faults and real bugs are found."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ttrace.judge.verdict import Exit, Verdict
from ttrace.layouts.placement import LayoutSource
from zoo.harness.hugging import Case, changed_by_recording, run_case, trace_references
from zoo.harness.limits import HANG
from zoo.harness.ranks import on_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MOES = ("qwen3_moe", "deepseek_v3")
TP = {"tp_size": 2, "tp_plan": "auto"}
FSDP = {"fsdp_size": 2}
DISPATCHED = {"tp_size": 2, "ep_size": 2}
MASKED_PLAN = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
MASKED = DISPATCHED | {"ep_plan": MASKED_PLAN}
FSDP_EP = {"fsdp_size": 2, "ep_size": 2}

CLEAN = [
    Case("llama", "tp", TP, num_accumulated=2),
    Case("llama", "fsdp", FSDP, num_accumulated=2),
    Case("gpt2", "fsdp", FSDP),
    *(Case(model, "tp", TP) for model in MOES),
    *(Case(model, "fsdp", FSDP) for model in MOES),
    *(Case(model, "dispatched", DISPATCHED) for model in MOES),
    *(Case(model, "masked", MASKED) for model in MOES),
    Case("deepseek_v2", "tp", TP),  # its attention has a style of its own, and complex numbers
]
CLEAN_ON_4 = [
    Case("llama", "fsdp+tp", FSDP | TP),
    *(Case(model, "fsdp4+ep2", {"fsdp_size": 4, "ep_size": 2}) for model in MOES),
]
NIGHTLY = [
    Case("gpt2", "fsdp", FSDP),
    Case("deepseek_v3", "tp", TP),
    Case("qwen3_moe", "fsdp", FSDP),
    Case("deepseek_v3", "dispatched", DISPATCHED),
    Case("qwen3_moe", "masked", MASKED),
    *CLEAN_ON_4[1:],
]
"""Clean cases of a kind of which another runs in .ci/run."""
DIVIDED_TWICE = [Case(model, "fsdp+ep", FSDP_EP) for model in MOES]
REPLICATED = Case("gpt2", "tp", TP)
ACCUMULATED = Case("qwen3_moe", "tp", TP, num_accumulated=2)
FORGOTTEN = Case("glm4_moe", "tp", TP)
NEUTRAL = [Case("qwen3_moe", "fsdp+ep", FSDP_EP), Case("qwen3_moe", "dispatched", DISPATCHED)]


# Faults: each in one module, through what transformers calls.


@contextmanager
def skip_reduction(style: str, name: str, model: nn.Module) -> Iterator[None]:
    """Leave one module's output a partial sum."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    chosen, target = ALL_PARALLEL_STYLES[style], model.get_submodule(name)
    right = chosen.transform_output_post_forward

    def wrong(module: nn.Module, output: Any, *args: Any, **kwargs: Any) -> Any:
        if module is not target:
            return right(module, output, *args, **kwargs)
        return output.to_local() if isinstance(output, DTensor) else output

    chosen.transform_output_post_forward = wrong
    try:
        yield
    finally:
        del chosen.transform_output_post_forward


@contextmanager
def skip_plan(name: str, model: nn.Module) -> Iterator[None]:
    """Run a module as if the plan did not contain it."""
    del model.get_submodule(name).forward
    yield


@contextmanager
def shift_tokens(name: str, model: nn.Module) -> Iterator[None]:
    """Shift the tokens by one on the last rank."""
    module = model.get_submodule(name)
    forward = module.forward
    if dist.get_rank() == dist.get_world_size() - 1:
        module.forward = lambda *args, **kwargs: torch.roll(forward(*args, **kwargs), 1, 0)
    yield


@contextmanager
def skip_averaging(name: str, model: nn.Module) -> Iterator[None]:
    """Let FSDP2 sum one module's gradients over ranks without dividing them."""
    module: Any = model.get_submodule(name)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    yield


@contextmanager
def divide_once(model: nn.Module) -> Iterator[None]:
    """Turn off the setting with which FSDP2 of torch 2.13 divides twice if it shards over one rank."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.set_force_sum_reduction_for_comms(False)
    yield


Change = Callable[[nn.Module], AbstractContextManager[None]]
DOWN, Q_NORM, EXPERTS = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_norm", "model.layers.1.mlp.experts"
FAULTS: list[tuple[Case, Change, str, str]] = [
    (Case("llama", "tp", TP), partial(skip_reduction, "rowwise", DOWN), DOWN, "missing all-reduce over tp"),
    (Case("qwen3_moe", "tp", TP), partial(skip_plan, Q_NORM), Q_NORM, "missing all-reduce over tp"),
    (
        Case("qwen3_moe", "masked", MASKED),
        partial(skip_reduction, "moe_tp_experts", EXPERTS),
        EXPERTS,
        "missing all-reduce over tp",
    ),
    (Case("deepseek_v3", "dispatched", DISPATCHED), partial(shift_tokens, EXPERTS), EXPERTS, "differ along tp"),
    (
        Case("llama", "fsdp", FSDP),
        partial(skip_averaging, "model.layers.1"),
        "model.layers.1.self_attn.q_proj",
        "scaled by fsdp (fsdp=2)",
    ),
    (Case("gpt2", "fsdp", FSDP), partial(shift_tokens, "transformer.h.1.mlp"), "transformer.h.1.mlp", "shifted by 1"),
]
"""The case, the fault, the module in which it is found, and the text of the cause."""


@dataclass
class Result:
    """What a launch found out about one case."""

    exit: Exit
    trouble: list[str] = field(default_factory=list)
    found: list[tuple[str, str, str]] = field(default_factory=list)
    """Findings: module, site, sentence."""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    by: Counter[LayoutSource] = field(default_factory=Counter)


def result_of(case: Case, folder: Path, change: Change | None = None) -> Result | None:
    judgement = run_case(case, folder, change)
    if judgement is None:
        return None
    wrong = [c for c in judgement.comparisons if c.verdict.is_wrong or c.spoils]
    return Result(
        judgement.exit,
        [*judgement.problems, *(f"{c.id} {c.verdict} {c.reason} {c.excess:.2g}" for c in wrong)][:8],
        [(f.module, str(f.comparison.id.site), f.cause.sentence) for f in judgement.findings],
        Counter(c.verdict for c in judgement.comparisons),
        Counter(c.by.source for c in judgement.comparisons if c.by is not None),
    )


Results = dict[str, Any]


def on_two_ranks(folder: Path, clean: list[Case]) -> Results:
    whole = [*clean, *DIVIDED_TWICE, REPLICATED, ACCUMULATED, FORGOTTEN]
    results: Results = {str(case): result_of(case, folder) for case in whole}
    results |= {f"{case} at {at}": result_of(case, folder, change) for case, change, at, _ in FAULTS}
    results |= {f"{case} once": result_of(case, folder, divide_once) for case in DIVIDED_TWICE}
    return results | {f"{case} neutral": changed_by_recording(case, folder) for case in NEUTRAL}


def on_four_ranks(folder: Path, clean: list[Case]) -> Results:
    return {str(case): result_of(case, folder) for case in clean}


@pytest.fixture(scope="module")
def results(selected: Callable[[str], list[Case]], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three launches: all references, then all candidates of two ranks and of four."""
    folder = tmp_path_factory.mktemp("transformers")
    chosen = selected("clean")
    on_two, on_four = ([case for case in cases if case in chosen] for cases in (CLEAN, CLEAN_ON_4))
    cases = [*on_two, *on_four, *DIVIDED_TWICE, REPLICATED, ACCUMULATED, FORGOTTEN, *(case for case, *_ in FAULTS)]
    on_ranks(1, trace_references, folder, cases)
    two: Results = on_ranks(2, on_two_ranks, folder, on_two)[0]
    four: Results = on_ranks(4, on_four_ranks, folder, on_four)[0]
    return two | four


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.nightly if case in NIGHTLY else [], id=str(case)) for case in cases]


@pytest.mark.parametrize("clean", params([*CLEAN, *CLEAN_ON_4]))
def test_a_clean_case_passes_with_every_tensor_covered(results: Results, clean: Case) -> None:
    result = results[str(clean)]
    assert result.exit is Exit.PASSED, result.trouble
    assert result.verdicts.total() - result.verdicts[Verdict.PASS] - result.verdicts[Verdict.UNJUDGED] == 0
    assert result.verdicts[Verdict.PASS] > 280


@pytest.mark.parametrize("clean", params([case for case in CLEAN if "tp_size" in case.config]))
def test_what_a_plan_says_is_stated_not_inferred(results: Results, clean: Case) -> None:
    by = results[str(clean)].by
    assert by[LayoutSource.ADAPTER] >= 35
    assert by[LayoutSource.DTENSOR] >= 60
    assert by[LayoutSource.SHAPES] < 0.75 * by.total()


@pytest.mark.parametrize("clean", params([*CLEAN, *CLEAN_ON_4]))
def test_only_tensor_parallelism_leaves_something_to_infer(results: Results, clean: Case) -> None:
    assert (results[str(clean)].by[LayoutSource.SHAPES] > 0) == (clean.config.get("tp_size", 1) > 1)


@pytest.mark.parametrize(("case", "module", "words"), [(c, m, w) for c, _, m, w in FAULTS], ids=str)
def test_a_fault_is_found_where_it_is(results: Results, case: Case, module: str, words: str) -> None:
    result = results[f"{case} at {module}"]
    assert result.exit is Exit.FOUND, result.trouble
    assert result.found[0][0] == module
    assert words in result.found[0][2]


@pytest.mark.parametrize("case", DIVIDED_TWICE, ids=str)
def test_gradients_of_experts_that_fsdp_divides_twice_are_found(results: Results, case: Case) -> None:
    """A bug of torch 2.13 that reaches users through DistributedConfig(fsdp_size=n, ep_size=n)."""
    result = results[str(case)]
    assert result.exit is Exit.FOUND
    for module, site, sentence in result.found:
        assert module.endswith(".mlp.experts")
        assert site == f"{module}.gate_up_proj/param_grad"
        assert sentence == "the candidate is 0.5 x the reference: scaled by 1/ep (ep=2)"
    once = results[f"{case} once"]
    assert once.exit is Exit.PASSED, once.trouble


def test_norms_whose_accumulated_gradients_are_reduced_twice_are_found(results: Results) -> None:
    """A bug of transformers 5.22: `replicated_with_grad_allreduce` sums what it summed after the first microbatch."""
    result = results[str(ACCUMULATED)]
    assert result.exit is Exit.FOUND
    modules = {module for module, _, _ in result.found}
    assert modules == {f"model.layers.{i}.self_attn.{norm}" for i in range(2) for norm in ("q_norm", "k_norm")}


def test_norms_that_a_plan_forgets_are_found(results: Results) -> None:
    """A bug of transformers 5.22: the plan of GLM-4-MoE names no norms between projections that it cuts."""
    result = results[str(FORGOTTEN)]
    assert result.exit is Exit.FOUND
    modules = {module for module, _, _ in result.found}
    assert modules == {f"model.layers.{i}.self_attn.{norm}" for i in range(2) for norm in ("q_norm", "k_norm")}
    assert all(sentence.endswith("missing all-reduce over tp") for _, _, sentence in result.found)


def test_a_model_without_a_plan_is_told_to_be_only_repeated(results: Results) -> None:
    result = results[str(REPLICATED)]
    assert result.exit is Exit.UNJUDGED
    assert result.trouble[0].startswith("axis tp=2 cuts, sums and distributes nothing")


@pytest.mark.parametrize("case", NEUTRAL, ids=str)
def test_recording_changes_no_bit(results: Results, case: Case) -> None:
    assert results[f"{case} neutral"] == []


@pytest.mark.nightly
def test_the_example_is_found_from_the_command_line_as_the_howto_shows(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "howto" / "transformers.md").read_text()
    shown = text.split("```console\n")[1].split("```")[0].splitlines()
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    command = [word.replace("examples/", f"{ROOT}/examples/") for word in shlex.split(shown[0].removeprefix("$ "))]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()[:2]] == shown[1:3]
