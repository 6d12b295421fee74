"""Own initial values that differ, agree or spread wrongly are found, and so are stale gradients; the rest is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.support.traces import RULE, Case, draw_tensor
from ttrace.judge.verdict import CauseName, Exit, Judgement
from ttrace.layouts.ids import Kind, Phase, TensorId
from ttrace.layouts.layout import Layout
from ttrace.layouts.placement import INFERRED, LayoutSource, Provenance
from ttrace.trace.collectives import Collective, Group
from ttrace.trace.format import Attachment, InitialValues
from ttrace.values.checksum import compute_checksum
from ttrace.values.generate import Normal, generate_values

SHAPE = (32, 32)
VALUES = Normal(0.0, 1.0)
Own = Callable[[int], torch.Tensor]
"""What a rank's part held before, by rank."""


def sum_up(tensor: torch.Tensor, *, repeats: bool = False) -> InitialValues:
    std, mean = torch.std_mean(tensor.double(), correction=0)
    return InitialValues(crc=compute_checksum(tensor.contiguous()), mean=float(mean), std=float(std), repeats=repeats)


def add_parameter(
    case: Case, name: str, own: Own, layout: str = "...", *, by: Provenance = RULE, repeats: bool = False
) -> None:
    """Add a parameter with generated values; `own` are those of the candidate before, the reference has `draw`."""
    tensor_id = TensorId.parse(f"0/-/{name}/param")
    case.reference.initial[0][name] = sum_up(draw_tensor(*SHAPE), repeats=repeats)
    for trace in (case.reference, case.twin, case.candidate):
        for rank in range(trace.mesh.num_ranks):
            read = Layout.parse(layout)
            region = read.region(SHAPE, trace.sizes, trace.mesh.coord(rank))
            part = generate_values(tensor_id, region, dtype=torch.float32, distribution=VALUES, seed=0)
            trace.record(rank, str(tensor_id), part, layout, shape=SHAPE, values=VALUES, by=by)
            if trace is case.candidate:
                trace.initial[rank][name] = sum_up(own(rank))


def judge(
    folder: Path, owns: Mapping[str, Own], layout: str = "...", mesh: str = "dp=2", **settings: object
) -> Judgement:
    case = Case(folder, mesh)
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    for name, own in owns.items():
        add_parameter(case, name, own, layout, **settings)  # type: ignore[arg-type]
    return case.judge()


def draw(rank: int) -> torch.Tensor:
    return draw_tensor(*SHAPE, seed=rank)


def test_replicas_of_own_values_are_found(tmp_path: Path) -> None:
    judgement = judge(tmp_path, {"fc.weight": draw, "fc.bias": draw, "norm.weight": lambda _: draw(0)})
    [finding] = judgement.findings
    assert judgement.exit is Exit.FOUND
    assert (finding.cause.name, finding.cause.axis, str(finding.comparison.id)) == (
        CauseName.NOT_BROADCAST,
        "dp",
        "0/-/fc.weight/param",
    )
    assert finding.cause.sentence == (
        "each rank of dp has its own initial values of fc.weight and 1 more: nothing has broadcast them"
    )
    assert [str(each) for each in finding.covers] == ["0/-/fc.bias/param"]


def test_equal_replicas_pass(tmp_path: Path) -> None:
    assert judge(tmp_path, {"fc.weight": lambda _: draw(3)}).exit is Exit.PASSED


@pytest.mark.parametrize("mesh", ["dp=2", "ranks=2"])
def test_an_inferred_replication_is_no_evidence(tmp_path: Path, mesh: str) -> None:
    assert judge(tmp_path, {"fc.weight": draw}, mesh=mesh, by=INFERRED).exit is Exit.PASSED


def test_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    assert judge(tmp_path, {"fc.weight": draw}, mesh="pp=2").findings == ()


@pytest.mark.parametrize(("dtype", "exit_code"), [("float32", Exit.PASSED), ("int64", Exit.FOUND)])
def test_a_broadcast_in_the_step_may_have_come_later(tmp_path: Path, dtype: str, exit_code: Exit) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    add_parameter(case, "fc.weight", draw)
    one = Collective(
        order=0, step=0, microbatch=0, module="", phase=Phase.FORWARD, op="broadcast", group=Group(axes=("dp",)),
        peer=0, shape=(4,), dtype=dtype, num_tensors=1, num_bytes=16, is_async=False, source="", begin=0,
    )  # fmt: skip
    case.candidate.collectives[1].append(one)
    assert case.judge().exit is exit_code


@pytest.mark.parametrize(("reduced", "exit_code"), [(("dp",), Exit.FOUND), ((), Exit.PASSED)])
def test_after_a_real_step_only_reduced_axes_count(tmp_path: Path, reduced: tuple[str, ...], exit_code: Exit) -> None:
    attachment = Attachment(model="Net", optimizers=("SGD",), data="", num_microbatches=1, labels=True)
    case = Case(tmp_path, "dp=2", attachment=attachment, reduced=reduced)
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    add_parameter(case, "fc.weight", draw)
    assert case.judge().exit is exit_code


def test_after_a_real_step_wrong_gradients_explain_replicas_that_differ(tmp_path: Path) -> None:
    attachment = Attachment(model="Net", optimizers=("SGD",), data="", num_microbatches=1, labels=True)
    case = Case(tmp_path, "dp=2", attachment=attachment, reduced=("dp",))
    case.add("0/0/fc/output", draw_tensor(4, 4), "a b/dp")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8), "a b", lambda x: 2 * x)
    add_parameter(case, "fc.weight", draw)
    assert [finding.comparison.id.kind for finding in case.judge().findings] == [Kind.PARAM_GRAD]


def test_values_that_a_script_loads_later_are_not_judged(tmp_path: Path) -> None:
    case = Case(tmp_path, "dp=2")
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    case.add("0/-/fc.weight/param", draw(5))  # not what was generated
    for rank in range(2):
        case.candidate.initial[rank]["fc.weight"] = sum_up(draw(rank))
    assert case.judge().exit is Exit.PASSED


def test_equal_shards_are_found(tmp_path: Path) -> None:
    judgement = judge(tmp_path, {"fc.weight": lambda _: draw(0)[:16]}, "out/tp in", mesh="tp=2")
    [finding] = judgement.findings
    assert (finding.cause.name, finding.cause.axis) == (CauseName.SAME_SEED, "tp")


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        (lambda rank: draw(rank)[:16], {}),
        (lambda _: torch.ones(16, 32), {}),
        (lambda _: draw(0)[:16], {"repeats": True}),
        (lambda _: draw(0)[:16], {"by": INFERRED}),
        (lambda _: draw(0)[:16], {"by": Provenance(LayoutSource.DTENSOR)}),
    ],
    ids=["different", "constant", "reference-repeats", "inferred", "dtensor"],
)
def test_shards_that_may_be_equal_pass(tmp_path: Path, own: Own, settings: dict[str, object]) -> None:
    assert judge(tmp_path, {"fc.weight": own}, "out/tp in", mesh="tp=2", **settings).exit is Exit.PASSED


def judge_spreads(folder: Path, factors: Mapping[str, float], whole: float = 1.0) -> Judgement:
    case = Case(folder, "tp=4")
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    for i, (name, factor) in enumerate(factors.items()):
        owns = [factor * draw_tensor(32, 8, seed=4 * i + rank) for rank in range(4)]
        add_parameter(case, name, owns.__getitem__, "out in/tp")
    add_parameter(case, "embedding.weight", lambda _: whole * draw(7))
    return case.judge()


THREE = ("layers.0.fc2.weight", "layers.1.fc2.weight", "layers.2.fc2.weight")


def test_a_fan_in_of_the_shard_is_found(tmp_path: Path) -> None:
    [finding] = judge_spreads(tmp_path, dict.fromkeys(THREE, 2.0) | {"fc1.weight": 1.0}).findings
    assert finding.cause.name is CauseName.SHARD_FAN_IN
    assert {str(each) for each in finding.covers} == {f"0/-/{name}/param" for name in THREE[1:]}


@pytest.mark.parametrize(
    ("factors", "whole"),
    [(dict.fromkeys(THREE[:2], 2.0), 1.0), (dict.fromkeys(THREE, 1.5), 1.0), (dict.fromkeys(THREE, 2.0), 2.0)],
    ids=["only-two", "another-factor", "unsharded-too"],
)
def test_other_spreads_pass(tmp_path: Path, factors: Mapping[str, float], whole: float) -> None:
    assert judge_spreads(tmp_path, factors, whole).exit is Exit.PASSED


def judge_stale(folder: Path, ours: tuple[str, ...] | None, theirs: tuple[str, ...] | None) -> Judgement:
    case = Case(folder, "dp=2")
    case.add("0/0/fc/output", draw_tensor(4, 4), f"a b/{next(iter(case.candidate.mesh.sizes))}")
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 4, seed=1))
    if ours is not None:
        case.reference.stale = {0: ours}
    if theirs is not None:
        case.candidate.stale = {1: theirs}
    return case.judge()


def test_stale_gradients_of_the_candidate_are_found(tmp_path: Path) -> None:
    [finding] = judge_stale(tmp_path, (), ("fc.weight",)).findings
    assert finding.cause.name is CauseName.STALE_GRADIENTS
    assert "is zero_grad missing?" in finding.cause.sentence


@pytest.mark.parametrize(
    ("ours", "theirs", "has_note"),
    [
        (("fc.weight",), ("fc.weight",), True),
        (("fc.weight",), (), True),
        ((), (), False),
        (None, ("fc.weight",), False),
        ((), None, False),
    ],
)
def test_other_stale_gradients_are_at_most_a_note(
    tmp_path: Path, ours: tuple[str, ...] | None, theirs: tuple[str, ...] | None, has_note: bool
) -> None:
    judgement = judge_stale(tmp_path, ours, theirs)
    assert judgement.exit is Exit.PASSED
    assert any("zero_grad" in note for note in judgement.notes) is has_note
