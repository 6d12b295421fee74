"""One command from two scripts to an answer; misuse says what to do; nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

import ttrace as public
from tests.support.commands import ROOT, TINY, run_example, script, ttrace
from tests.support.pages import blocks
from tests.support.speed import cpu_limit
from tests.support.traces import Case, TraceBuilder, draw_tensor, nudge
from ttrace.capture.plan import Plan
from ttrace.errors import TTraceError
from ttrace.judge.verdict import Exit
from ttrace.report.machine.json_report import as_json
from ttrace.trace.store import Remote
from ttrace.workflow.flow import Commands, Flow
from ttrace.workflow.launch import launch
from ttrace.workflow.run import Run, RunTraces, Strictness
from ttrace.workflow.stages import Stage


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_the_dtensor_examples_bug_is_found_and_its_clean_run_is_quiet(tmp_path: Path) -> None:
    """The other example is the README's, and run with it."""
    example, module = "dtensor_tp", "layers.1.gated"
    with cpu_limit(60):
        clean = run_example(example, tmp_path / "clean")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "✓ every tensor agrees" in clean.stdout
    assert "so far wrong" not in clean.stderr

    with cpu_limit(90):
        buggy = run_example(example, tmp_path / "buggy", "--bug", more=("--json",))
    assert buggy.returncode == 1, buggy.stdout + buggy.stderr
    told = buggy.stderr.splitlines()
    assert told[
        told.index("so far wrong first: 0/0/layers.1.gated/grad_input. Running again to explain it.") - 1
    ].startswith("check: ")
    first = json.loads(buggy.stdout)["findings"][0]
    assert (first["module"], first["kind"], first["axis"]) == (module, "grad_input", "tp")
    assert first["sentence"] == "replicas differ and sum to the reference: missing all-reduce over tp"

    again = ttrace("check", str(tmp_path / "buggy"))
    assert again.returncode == 1
    assert again.stdout.splitlines()[-1] == f"next: ttrace diff {tmp_path}/buggy 0/0/{module}/grad_input"
    shown = ttrace("diff", str(tmp_path / "buggy"), f"0/0/{module}/grad_input")
    assert shown.returncode == 0
    assert "rank 1 (tp1)" in shown.stdout


def test_examples_are_short_and_need_at_most_five_lines_for_ttrace() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        lines = path.read_text().splitlines()
        # To build a model and its optimizer takes more with Megatron.
        assert len(lines) < (130 if path.stem.startswith("megatron") else 80), path
        if path.stem == "unchanged":
            assert not re.search(r"ttrace|session", "\n".join(lines[1:])), path
            continue
        numbered = [line.rpartition("  # ")[2] for line in lines if re.search(r"  # \d$", line)]
        assert numbered == [str(i + 1) for i in range(len(numbered))]
        assert 3 <= len(numbered) <= 5
        # Nothing that speaks of ttrace, its session or its rules is left unnumbered.
        ours = [line for line in lines if re.search(r"ttrace|session|RULES", line) and not line.startswith('"""')]
        assert len(ours) == len(numbered), path


@pytest.mark.usefixtures("warm_commands")
def test_a_script_that_never_attaches_is_told_what_to_do(tmp_path: Path) -> None:
    command = script(tmp_path, "print('hello')")
    done = ttrace("run", "--reference", command, "--candidate", command, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "left no trace: no process of it trained a model with an optimizer of torch" in " ".join(done.stderr.split())


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_one_traced_command_is_held_to_the_same(tmp_path: Path) -> None:
    for body, words in {
        "print('hello')": "left no trace: no process of it trained a model with an optimizer of torch",
        "raise RuntimeError('bad luck')": "RuntimeError: bad luck",
        UNFINISHED: "its rank 0 never finished the traced steps",
    }.items():
        command = script(tmp_path, body)
        done = ttrace("trace", "--out", str(tmp_path / "trace"), "--", *command.split())
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())
        assert str(tmp_path / "trace.log") in "".join(done.stderr.split())


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_an_old_trace_does_not_stand_in_for_a_new_one(tmp_path: Path) -> None:
    out = str(tmp_path / "trace")
    assert ttrace("trace", "--out", out, "--", *script(tmp_path, TINY).split()).returncode == 0
    done = ttrace("trace", "--out", out, "--", *script(tmp_path, "print('hello')").split())
    assert done.returncode == 2
    assert "left no trace" in done.stderr


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_a_trace_is_not_written_over_its_reference(tmp_path: Path) -> None:
    out = str(tmp_path / "trace")
    command = script(tmp_path, TINY).split()
    assert ttrace("trace", "--out", out, "--", *command).returncode == 0
    done = ttrace("trace", "--out", out, "--reference", out, "--", *command)
    assert done.returncode == 2
    assert "holds the reference" in done.stderr
    assert ttrace("show", out).returncode == 0


@pytest.mark.usefixtures("warm_commands")
def test_a_script_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = script(tmp_path, "print('about to fail')\nraise RuntimeError('out of [luck]')")
    done = ttrace("run", "--reference", command, "--candidate", command, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "ended with status 1" in done.stderr
    assert "RuntimeError: out of [luck]" in done.stderr


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = ttrace("run", "--reference", "no-such-thing", "--candidate", "x", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "no-such-thing cannot be started" in done.stderr


@pytest.mark.usefixtures("warm_commands")
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    done = ttrace("run", "--reference", "true", "--candidate", "true", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "Choose another --out" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.usefixtures("warm_commands")
def test_a_folder_without_traces_is_explained(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text("{}")
    for command, folder, words in (
        ("show", tmp_path, "holds no trace"),
        ("check", tmp_path, "holds no run"),
        ("check", tmp_path / "runs", "There are runs in it: first"),
        ("check", tmp_path / "runs" / "first", "a run without a reference"),
        ("check", tmp_path / "nowhere", "does not exist"),
    ):
        done = ttrace(command, str(folder))
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_command_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    command = ("bash", "-c", "sleep 7200 & echo $!; sleep 7200")  # starts at once, on a busy machine too
    with pytest.raises(TTraceError, match="did not end within 2 s"):
        launch(command, Plan(out=tmp_path / "trace"), timeout=2)
    child = int((tmp_path / "trace.log").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


UNFINISHED = """
import torch, ttrace
ttrace.attach(torch.nn.Linear(4, 4))
"""


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_trace_then_show_and_programs_read_json(tmp_path: Path) -> None:
    command = script(tmp_path, TINY).split()
    traced = ttrace("trace", "--out", str(tmp_path / "trace"), "--json", "--", *command)
    assert traced.returncode == 0, traced.stderr
    assert json.loads(traced.stdout)["tensors"] == 9
    shown = ttrace("show", str(tmp_path / "trace"), "--json")
    assert {row["id"] for row in json.loads(shown.stdout)} >= {"0/0/./loss", "0/-/weight/param_grad"}
    one = ttrace("show", str(tmp_path / "trace"), "0/0/./output")
    assert "rank 0" in one.stdout
    assert "never reached" not in (tmp_path / "trace.log").read_text()


NOISY = """
import os, sys, torch, ttrace
size = float(sys.argv[1])


class Noisy(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        seed = int.from_bytes(os.urandom(4), "little")  # no generator of torch's: what atomics do is not seen either
        return y * (1 + size * torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)))


model = torch.nn.Sequential(torch.nn.Linear(64, 64), Noisy(64, 64), torch.nn.Linear(64, 64))
if len(sys.argv) > 2:
    model[0].weight.register_hook(lambda grad: 2 * grad)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ttrace.attach(model, optimizer)
with session.step():
    model(session.batch(torch.randn(32, 64))).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.slow
def test_a_noisy_candidate_is_run_again_before_it_is_accused(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    command, out = f"python {tmp_path / 'noisy.py'}", tmp_path / "run"

    def report(candidate: str) -> tuple[int, list[str], list[str]]:
        words = ("run", "--reference", f"{command} 0", "--candidate", f"{command} {candidate}", "--out", str(out))
        done = ttrace(*words, "--twins", "1", "--no-isolate", "--json")
        found = json.loads(done.stdout)
        return done.returncode, [finding["module"] for finding in found["findings"]], found["notes"]

    code, _, notes = report("1e-6")
    assert code == 0
    assert notes[0].startswith("the candidate is not deterministic")
    again = ttrace("check", str(out))
    assert again.returncode == 0
    assert "the candidate is not deterministic" in again.stdout
    code, modules, notes = report("1e-6 wrong")
    assert (code, modules) == (1, ["0"])
    assert notes[0].startswith("the candidate is not deterministic")
    code, _, notes = report("0 wrong")
    assert code == 1
    assert not any("deterministic" in note for note in notes)
    assert not (out / "repeat").exists()


def write_traces(folder: Path, num_twins: int = 1, *, num_tensors: int = 1) -> Run:
    """A clean run whose traces were written one by one."""
    case = Case(folder)
    for number in range(num_tensors):
        case.add(f"0/0/fc.{number}/output", draw_tensor(16, 8, seed=number), "t h/tp")
    case.reference.close()
    case.candidate.close()
    for number in range(1, num_twins + 1):
        case.twin.folder = folder / f"twin-{number}"
        case.twin.close()
    return Run(folder)


def test_verdicts_are_read_only_from_a_report_that_is_newer_than_the_traces(tmp_path: Path) -> None:
    run = write_traces(tmp_path)
    report = tmp_path / "report.json"
    assert run.read_verdicts() == {}
    report.write_text('{"tensors": [{"id": "0/0/fc.0/output", "verdict": "PASS"}]}')
    assert run.read_verdicts() == {"0/0/fc.0/output": "PASS"}
    written = report.stat().st_mtime_ns
    os.utime(run.candidate / "rank-00001" / "manifest.json", ns=(written, written + 1))
    assert run.read_verdicts() == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tensors": [1]}', '{"tensors": [{"id": "a"}]}'])
def test_what_is_no_report_has_no_verdicts(tmp_path: Path, text: str) -> None:
    run = write_traces(tmp_path)
    (tmp_path / "report.json").write_text(text)
    assert run.read_verdicts() == {}


def test_a_run_without_twins_is_not_judged(tmp_path: Path) -> None:
    """Rounding alone would be a finding."""
    run = write_traces(tmp_path, num_twins=0)
    with pytest.raises(TTraceError, match="holds no complete twin, but tolerances come from twins"):
        run.judge()
    with pytest.raises(TTraceError, match="holds no complete twin"):
        run.selftest()


def test_a_twin_that_was_cut_off_is_left_out_and_named(tmp_path: Path) -> None:
    run = write_traces(tmp_path, num_twins=2)
    expected = [comparison.verdict for comparison in run.judge().comparisons]
    (run.twin(1) / "rank-00000" / "end.json").unlink()
    run.twin(3).mkdir()
    judgement = run.judge()
    assert judgement.exit is Exit.PASSED
    assert [comparison.verdict for comparison in judgement.comparisons] == expected
    left_out = [note for note in judgement.notes if "was left out" in note]
    assert [note.split()[0] for note in left_out] == ["twin-1", "twin-3"]
    assert "twin-1/rank-00000 is incomplete" in left_out[0]
    (run.twin(2) / "rank-00000" / "manifest.json").unlink()
    with pytest.raises(TTraceError, match=r"no complete twin.* twin-1 was left out.* twin-2 was left out.*ttrace run"):
        run.judge()


@pytest.mark.parametrize(
    ("side", "file"), [("reference", "end.json"), ("candidate", "end.json"), ("candidate", "manifest.json")]
)
def test_a_side_that_was_cut_off_is_not_judged(tmp_path: Path, side: str, file: str) -> None:
    """Without an end nobody knows by which factor its gradients are off, nor what else it would have recorded."""
    run = write_traces(tmp_path)
    assert run.judge().exit is Exit.PASSED
    rank = "rank-00001" if side == "candidate" else "rank-00000"
    (tmp_path / side / rank / file).unlink()
    with pytest.raises(TTraceError, match=side):
        run.judge()


def test_a_trace_in_the_place_of_another_is_not_judged(tmp_path: Path) -> None:
    run = write_traces(tmp_path)
    for here, other, role in (("reference", "twin-1", "twin"), ("twin-1", "reference", "reference")):
        shutil.move(tmp_path / here, tmp_path / "away")
        shutil.copytree(tmp_path / other, tmp_path / here)
        with pytest.raises(TTraceError, match=f"{here} has the role {role}, but"):
            run.judge()
        shutil.rmtree(tmp_path / here)
        shutil.move(tmp_path / "away", tmp_path / here)
    assert run.judge().exit is Exit.PASSED


@pytest.fixture
def investigated(tmp_path: Path) -> Run:
    """A run with a finding, and everything that follows a finding up, written one by one."""
    right, wrong = draw_tensor(16, 8), draw_tensor(16, 8, seed=1)
    for name, error in (("", 0.1), ("full", 0.2), ("isolated", 0.3)):
        case = Case(tmp_path / name, isolated=name == "isolated")
        for builder in (case.reference, case.twin):
            builder._manifest["isolated"] = name == "isolated"
        case.add("0/0/fc.0/output", right, "t h/tp")
        case.add_trusted("0/0/fc.1/output", wrong)
        case.candidate.record_parts("0/0/fc.1/output", nudge(wrong, error), "t h/tp")
        case.judge()
    for name, role, mesh, layout in (("echo", "echo", "", "..."), ("repeat", "candidate", "tp=2", "t h/tp")):
        again = TraceBuilder(tmp_path / name, mesh, role)
        again.record_parts("0/0/fc.0/output", nudge(right, 1e-5), layout)
        again.record_parts("0/0/fc.1/output", nudge(wrong, 1e-5), layout)
        again.close()
    return Run(tmp_path)


def test_a_run_in_a_store_is_judged_as_its_folder_is(investigated: Run) -> None:
    """With echo, repeat, isolated and full: each of them changes the judgement."""
    stored = RunTraces(Remote("memory://bucket/run"))
    for file in investigated.folder.rglob("*"):
        if file.is_file():
            Remote(f"{stored.folder}/{file.relative_to(investigated.folder)}").put(file)
    reports = [as_json(stored.judge(), ""), as_json(investigated.judge(), "")]
    assert reports[0] == reports[1]
    assert stored.most_detailed == stored.full
    for name in ("echo", "repeat", "isolated", "full"):
        shutil.rmtree(investigated.folder / name)
        reports.append(as_json(investigated.judge(), ""))
        assert reports[-1] != reports[-2], name


def test_python_judges_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/reference/api.md runs."""
    run = write_traces(tmp_path / "runs" / "bug")
    monkeypatch.chdir(tmp_path)
    (code,) = (block.text for block in blocks(ROOT / "docs" / "reference" / "api.md") if "runs/bug" in block.text)
    exec(code, {})
    judgement = public.check("runs/bug", margin=8.0)
    assert judgement.exit is Exit.PASSED
    assert as_json(judgement, "") == as_json(run.judge(Strictness(8.0)), "")
    with pytest.raises(TTraceError, match="these rules change no layout"):
        public.check(run.folder, rules={"nothing": "a b"})


def test_what_was_cut_off_beside_a_run_has_no_say(tmp_path: Path) -> None:
    run = write_traces(tmp_path / "run")
    for other in (run.isolated, run.full):
        write_traces(other.folder)
        (other.candidate / "rank-00001" / "end.json").unlink()
    assert run.most_detailed == run
    shutil.copytree(run.candidate, run.repeat)
    (run.repeat / "rank-00000" / "end.json").unlink()
    assert run.judge().exit is Exit.PASSED


def test_twins_are_counted_not_spelled(tmp_path: Path) -> None:
    """Of `twin-10` and `twin-2`, the second is the earlier one, and more than asked for are removed."""
    run = write_traces(tmp_path, num_twins=11)
    assert run.twins() == [run.twin(number) for number in range(1, 12)]
    done = [Stage(("true",), Plan(out=run.twin(number), role="twin", twin=number)) for number in range(1, 12)]
    flow = Flow(run, Commands(("true",), ("true",), 2, 60.0), Plan(out=tmp_path))
    with pytest.raises(TTraceError):  # the reference that it makes then is none
        flow.trace_references()
    assert not [stage for stage in done[2:] if stage.plan.out.exists()]


def test_a_damaged_run_file_is_refused_by_name(tmp_path: Path) -> None:
    run = write_traces(tmp_path)
    (tmp_path / "run.json").write_text('{"reference": "python train.py"}')
    with pytest.raises(TTraceError, match=r"run\.json is damaged"):
        run.judge()
