"""What commands print, without running anything."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.support.pages import ROOT
from tests.support.traces import Case, draw_tensor
from ttrace.capture.plan import Plan
from ttrace.cli import app
from ttrace.cli.options import PANELS, Recording, make_plan
from ttrace.errors import TTraceError
from ttrace.trace.seal import seal_document

TAKERS = ("run", "trace", "sweep")
"""The commands that record."""


def lint(*args: str) -> str:
    done = CliRunner().invoke(app, ["lint", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_lint_lists_what_nobody_stated_and_suggests_rules_on_request(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc1/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc1/output", full.chunk(2, 1)[rank].contiguous())
    case.add_right("0/0/fc2/output")
    case.judge()
    assert lint(str(tmp_path)).splitlines() == [
        'fc1/output: inferred "d0 d1/tp"',
        f"next: ttrace lint {tmp_path} --suggest",
    ]
    assert tomllib.loads(lint(str(tmp_path), "--suggest")) == {"layouts": {"fc1/output": "d0 d1/tp"}}
    assert json.loads(lint(str(tmp_path), "--json"))[0]["site"] == "fc1/output"


def test_lint_states_nothing_with_which_the_candidate_is_wrong(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc1/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc1/output", 3 * full.chunk(2, 1)[rank].contiguous())
    case.judge()
    assert lint(str(tmp_path)).splitlines()[0] == 'fc1/output: contradicted "d0 d1/tp"'
    suggested = lint(str(tmp_path), "--suggest")
    assert tomllib.loads(suggested) == {"layouts": {}}
    assert '# "fc1/output" = "d0 d1/tp"' in suggested


def test_diff_takes_an_id_without_its_step_or_outer_modules_and_names_near_ones(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    case.add_right("0/0/fc2/output")
    case.add_right("0/0/layers.3.proj/output")
    case.judge()
    result = CliRunner().invoke(app, ["diff", str(tmp_path), "fc2/output"])
    assert result.exit_code == 0, result.output
    inner = CliRunner().invoke(app, ["diff", str(tmp_path), "proj/output"])
    assert inner.exit_code == 0, inner.output
    wrong = CliRunner().invoke(app, ["diff", str(tmp_path), "0/0/fc2/outputs"])
    assert isinstance(wrong.exception, TTraceError)
    assert "Did you mean fc2/output" in str(wrong.exception)


def test_explain_judges_the_run_and_explains_one_tensor(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    case.add_right("0/0/fc1/output")
    case.add("0/0/fc2/output", draw_tensor(4, 8), "a b/tp", lambda x: 2 * x)
    case.judge()
    result = CliRunner().invoke(app, ["explain", str(tmp_path), "fc2/output"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0/0/fc2/output is FAIL\n")
    assert result.output.splitlines()[-1] == f"next: ttrace show {tmp_path} 0/0/fc2/output"
    result = CliRunner().invoke(app, ["explain", str(tmp_path), "fc2/output", "--json"])
    assert json.loads(result.output)["cause"] == "double reduction"


def test_doctor_exits_with_2_where_something_does_not_work(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    done = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path)], env=nothing)
    assert done.exit_code == 2, done.output
    assert "✗ torchrun is not on PATH." in done.output
    report = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path / "new"), "--json"], env=nothing)
    assert report.exit_code == 2
    assert [problem["name"] for problem in json.loads(report.stdout)["problems"]] == ["torchrun is not on PATH"]
    assert list(tmp_path.iterdir()) == []


def test_lint_says_when_everything_is_stated(tmp_path: Path) -> None:
    case = Case(tmp_path, "tp=2")
    case.add_right("0/0/fc2/output")
    case.judge()
    assert lint(str(tmp_path)) == "every layout is stated\n"


def record_clean_run(tmp_path: Path, *, update: float) -> Case:
    """Record a clean run with one trained parameter."""
    case = Case(tmp_path, "tp=2", parameters={"fc.weight": True})
    full = draw_tensor(4, 8)
    for microbatch in range(2):
        case.add(f"0/{microbatch}/fc/output", draw_tensor(4, 8, seed=3 + microbatch), "a b/tp")
    case.add("0/-/fc.weight/param", full, "a b/tp", noise=0.0)
    case.add("0/-/fc.weight/param_grad", draw_tensor(4, 8, seed=1), "a b/tp")
    case.add("0/-/fc.weight/param_after", full + update * draw_tensor(4, 8, seed=2), "a b/tp", noise=0.0)
    case.judge()
    return case


def test_selftest_tells_people_what_is_seen_by_kind(tmp_path: Path) -> None:
    record_clean_run(tmp_path, update=1e-2)
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["selftest", str(tmp_path)])
    assert done.exit_code == 0, done.output
    first, _, head, *rows = done.output.splitlines()
    assert first.startswith("median and worst: the smallest relative error")
    assert head.split()[:3] == ["kind", "tensors", "judged"]
    output = next(row.split() for row in rows if row.startswith("output"))
    assert output[:3] == ["output", "2", "2"]
    assert output[-1] == "2/2"
    assert rows[-1] == "✓ a fault in any parameter would have been found"


def test_selftest_names_the_parameters_that_nothing_protects(tmp_path: Path) -> None:
    record_clean_run(tmp_path, update=0.0)
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["selftest", str(tmp_path)])
    assert done.exit_code == 2
    assert "? not tested: fc.weight (its update is zero or not judged" in done.output
    report = json.loads(CliRunner().invoke(app, ["selftest", str(tmp_path), "--json"]).stdout)
    assert report["exit"] == 2
    assert list(report["without_power"]) == ["fc.weight"]
    first = report["tensors"][0]
    assert (first["protects"], first["seen"]["one rank's part lost"]) == (True, True)
    assert 1 < first["scale"] <= 1 + first["error"]


def test_selftest_wants_a_clean_run(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_wrong("0/0/fc/output")
    case.judge()
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["selftest", str(tmp_path)])
    assert isinstance(done.exception, TTraceError)
    assert "has findings, and a selftest needs a run without any" in str(done.exception)


def test_check_and_report_write_the_page(tmp_path: Path) -> None:
    case = Case(tmp_path / "run")
    case.add_wrong("0/0/fc/output")
    case.judge()
    run, out = tmp_path / "run", tmp_path / "other.html"
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", str(run)])
    assert done.exit_code == 1
    assert done.output.splitlines()[-2] == f"report: {run / 'report.html'}"
    assert (run / "report.html").exists()
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["report", str(run), "-o", str(out)])
    assert (done.exit_code, done.output) == (0, f"report: {out}\n")
    assert out.read_text() == (run / "report.html").read_text()


def test_show_has_the_verdicts_of_the_last_check(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/a/output")
    case.add_wrong("0/0/fc/output")
    case.judge()

    def show(*words: str) -> list[str]:
        done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["show", *words])
        assert done.exit_code == 0, done.output
        return done.output.splitlines()

    assert "verdict" not in show(str(tmp_path))[0]  # nothing is judged for a listing
    CliRunner().invoke(app, ["check", str(tmp_path)])
    head, *rows, _ = show(str(tmp_path))
    assert head.split()[-1] == "verdict"
    assert {(row.split()[0], row.split()[-1]) for row in rows} == {("0/0/a/output", "PASS"), ("0/0/fc/output", "FAIL")}
    assert show(str(tmp_path), "0/0/fc/output")[0] == "0/0/fc/output is FAIL"
    assert "verdict" not in show(str(tmp_path / "candidate"))[0]
    assert {row["verdict"] for row in json.loads("".join(show(str(tmp_path), "--json")))} == {"PASS", "FAIL"}


def test_a_wrong_path_names_the_command_that_makes_a_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(tmp_path / "typo")])
    assert str(done.exception) == f"{tmp_path}/typo does not exist. Give the folder that `ttrace run --out` wrote."


def test_what_is_no_run_is_told_apart(tmp_path: Path) -> None:
    case = Case(tmp_path / "run")
    case.add_right("0/0/fc/output")
    case.judge()
    (tmp_path / "run" / "run.json").write_text(seal_document('{"folder": ""}'))
    (tmp_path / "file").touch()
    assert refusal("check", tmp_path / "file").startswith(f"{tmp_path}/file is a file. Give the folder")
    words = f"{tmp_path}/run/candidate is one trace, not a run. Give the folder"
    for command in (["check"], ["diff", "fc/output"], ["explain", "fc/output"]):
        assert refusal(command[0], tmp_path / "run" / "candidate", *command[1:]).startswith(words)
    assert refusal("show", tmp_path) == f"{tmp_path} holds no run. There are runs in it: run."
    assert refusal("show", tmp_path / "typo") == refusal("check", tmp_path / "typo")


@pytest.mark.parametrize("command", ["check", "diff", "explain"])
def test_a_run_without_a_rank_is_refused(tmp_path: Path, command: str) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.judge()
    shutil.rmtree(tmp_path / "candidate" / "rank-00001")
    words = refusal(command, tmp_path, *([] if command == "check" else ["fc/output"]))
    assert words.startswith(f"{tmp_path}/candidate: rank 1 of 2 left no trace, so nothing can be judged. Trace again")


@pytest.mark.parametrize("command", ["diff", "explain", "show"])
def test_an_unknown_id_names_the_command_that_lists_all(tmp_path: Path, command: str) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.judge()
    assert refusal(command, tmp_path, "nothing").endswith(f"`ttrace show {tmp_path}` lists all.")


@pytest.mark.parametrize(
    ("lines", "why"),
    [('"typo/output" = "a b"', 'rule "typo/output" (rules.toml) matched nothing'), ("", "they contain no rule")],
)
def test_rules_of_which_none_matches_are_refused(tmp_path: Path, lines: str, why: str) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.judge()
    (tmp_path / "rules.toml").write_text(f"[layouts]\n{lines}\n")
    words = refusal("check", tmp_path, "--rules", str(tmp_path / "rules.toml"))
    assert words.startswith(f"these rules change no layout: {why}. `ttrace show {tmp_path}` lists the names")


def refusal(command: str, folder: Path, *words: str) -> str:
    """What a command that exits with 2 says."""
    done = CliRunner().invoke(app, [command, str(folder), *words])
    assert isinstance(done.exception, TTraceError), done.output
    return str(done.exception)


def test_a_run_that_fails_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    words = ["run", "--reference", "false", "--candidate", "false", "--out", str(tmp_path / "run")]
    assert isinstance(CliRunner().invoke(app, words).exception, TTraceError)
    reports = [tmp_path / "run" / name for name in ("report.json", "report.html")]
    for report in reports:
        report.write_text("of an earlier run")
    assert isinstance(CliRunner().invoke(app, words).exception, TTraceError)
    assert not [report for report in reports if report.exists()]


def test_a_clean_run_is_followed_by_its_selftest(tmp_path: Path) -> None:
    record_clean_run(tmp_path, update=1e-2)
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", str(tmp_path)])
    assert done.output.splitlines()[-1] == f"next: ttrace selftest {tmp_path}"


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/fc/output")
    case.judge()
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "such" / "folder.html")])
    assert isinstance(done.exception, TTraceError)
    assert "cannot be written" in str(done.exception)


def record_mistaken_run(folder: Path) -> None:
    """Record a run in which the annotation of one tensor is wrong: the tensor is cut into stripes."""
    case = Case(folder, "tp=2")
    case.add_right("0/0/fc2/output")
    full = draw_tensor(4, 8)
    case.add_trusted("0/0/fc1/output", full)
    for rank in range(2):
        case.candidate.record(rank, "0/0/fc1/output", full[:, rank::2].contiguous(), "a b/tp", shape=(4, 8))
    case.judge()


def run_check(*args: str, **environment: str) -> Result:
    outside = {"GITHUB_ACTIONS": "", "GITHUB_STEP_SUMMARY": ""}
    return CliRunner(env={**outside, **environment}).invoke(app, ["check", *args])


def test_a_check_by_other_rules_needs_no_new_trace(tmp_path: Path) -> None:
    record_mistaken_run(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    rules.write_text('[layouts]\n"fc1/output" = "a b/tp:striped"\n')
    assert run_check(str(tmp_path / "run")).exit_code == 1
    assert run_check(str(tmp_path / "run"), "--rules", str(rules)).exit_code == 0


def test_known_findings_do_not_fail_a_check(tmp_path: Path) -> None:
    record_mistaken_run(tmp_path / "run")
    words = (str(tmp_path / "run"), "--baseline", str(tmp_path / "known.json"))
    missing = run_check(*words)
    assert isinstance(missing.exception, TTraceError)
    assert "--update-baseline writes one" in str(missing.exception)
    assert isinstance(run_check(words[0], "--update-baseline").exception, TTraceError)
    assert run_check(*words, "--update-baseline").exit_code == 0
    assert run_check(*words, "--json").exit_code == 0
    (tmp_path / "known.json").write_text('{"findings": []}')
    assert run_check(*words).exit_code == 1


def test_ci_systems_are_told_in_their_own_words(tmp_path: Path) -> None:
    record_mistaken_run(tmp_path / "run")
    junit, summary, known = (str(tmp_path / name) for name in ("junit.xml", "summary.md", "known.json"))
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": summary}
    done = run_check(str(tmp_path / "run"), "--junit", junit, "--json", **github)
    assert json.loads(done.stdout)["exit"] == 1  # what GitHub reads is on the other stream
    assert done.stderr.splitlines()[0].startswith("::error file=model.py,line=1,title=ttrace")
    assert "<failure message=" in Path(junit).read_text()
    assert "`fc1/output`" in Path(summary).read_text()
    quiet = run_check(str(tmp_path / "run"), "--baseline", known, "--update-baseline", "--junit", junit, **github)
    assert "::error" not in quiet.stderr
    assert "<failure" not in Path(junit).read_text()


def test_every_recording_option_is_in_run_trace_sweep_and_the_docs() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group, as the app has commands
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for field in fields(Recording):
        (declared,) = {next(tuple(p.opts) for p in commands[name].params if p.name == field.name) for name in TAKERS}
        assert f"| `{declared[0]}" in page


def test_a_plan_has_what_its_options_say(tmp_path: Path) -> None:
    plain = make_plan(tmp_path, Recording())
    assert plain == Plan(out=tmp_path)
    (tmp_path / "rules.toml").write_text('[layouts]\n"fc" = "a b/tp"\n')
    rules = tmp_path / "rules.toml"
    given = Recording(steps=2, only=["a"], own_parameters=True, budget=0.5, mesh="dp=2,tp=4", rules=rules)
    changed = {"num_steps": 2, "only": ("a",), "parameters": "own", "budget": 500_000_000, "mesh": "dp=2 tp=4"}
    assert make_plan(tmp_path, given) == Plan(out=tmp_path, rules={"fc": "a b/tp"}, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["run", "trace", "check", "sweep"])
def test_help_shows_options_in_panels_in_one_order(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"]).output
    places = [shown.index(f"\n{panel}:\n") for panel in PANELS if f"\n{panel}:\n" in shown]
    assert places == sorted(places)
    assert len(places) >= 3
