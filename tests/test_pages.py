"""README, tutorial and how-to pages do what they say: every command is run, all code is part of files that are."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ttrace
from tests.support.pages import INSTALL, README, ROOT, Reader, blocks, fits, is_part_of
from tests.support.speed import measure_slowness
from ttrace.cli import app
from ttrace.judge.verdict import Cause, CauseName, Comparison, Finding, Judgement, Verdict
from ttrace.layouts.ids import TensorId
from ttrace.report.machine import json_report

DOCS = ROOT / "docs"
TUTORIAL, TRANSCRIPT = DOCS / "tutorial.md", DOCS / "transcript.txt"
ELSEWHERE = {
    "megatron.md": "tests/megatron/test_example.py",
    "torchtitan.md": "tests/zoo/test_frameworks.py",
    "transformers.md": "tests/adapters/transformers/test_layouts.py",
}
"""Pages whose commands need more than the others, and who runs them."""
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "ray", "trainer")
"""Pages whose scripts tests/zoo/test_frameworks.py runs in each submission: the pages themselves take half an hour."""
COVERED = ("checkpoints", "sweep", "upgrades")
"""Pages that other tests in tests/workflow (resume, sweeps, upgrades) cover in each submission."""
HOW_TO = sorted(path for path in (DOCS / "howto").glob("*.md") if path.name not in ELSEWHERE)
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
REMOVED = {
    "CHANGELOG.md": {"archive", "--restore", "bisect-exit", "--perfetto", "--tensorboard", "--wandb"},
    "0018-archives.md": {"archive", "--restore"},
    "migrate.md": {"archive", "bisect-exit", "--perfetto", "--tensorboard", "--wandb"},
}
"""Commands and options of earlier versions, by the page that still names them."""
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """All pages share one folder: what README has run, the others only look at."""
    folder = tmp_path_factory.mktemp("reader")
    for scripts in ("examples", "zoo/frameworks/scripts"):
        shutil.copytree(ROOT / scripts, folder / scripts, ignore=shutil.ignore_patterns("__pycache__"))
    found = Reader(folder)
    found.ran[INSTALL] = found.run("true")
    found.follow(README)
    yield found
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        README,
        TUTORIAL,
        *(
            pytest.param(page, marks=pytest.mark.nightly) if page.stem in (*FRAMEWORKS, *COVERED) else page
            for page in HOW_TO
        ),
    ],
    ids=lambda page: page.stem,
)
def test_commands_print_what_the_page_shows(reader: Reader, page: Path, request: pytest.FixtureRequest) -> None:
    if page in HOW_TO:  # README and the tutorial run as a user types them
        request.getfixturevalue("warm_commands")
    for command, shown, ran in reader.follow(page):
        marks = [line[0] for line in shown if line.startswith(("✓", "✗"))]
        assert ran.status == (1 if marks[-1:] == ["✗"] else 0), f"{command}\n{ran.output}"
        assert fits(shown, ran.output.splitlines()), f"{command}\n{ran.output}"


@pytest.mark.slow
def test_the_quick_start_finds_module_kind_axis_and_cause(reader: Reader) -> None:
    found = json.loads((reader.folder / "runs" / "bug" / "report.json").read_text())["findings"]
    assert [(f["module"], f["kind"], f["axis"]) for f in found] == [("layers.1.fc1", "grad_input", "tp")]
    assert found[0]["sentence"] == "replicas differ and sum to the reference: missing all-reduce over tp"


@pytest.mark.slow
def test_the_tutorial_is_short_and_its_transcript_is_what_happens(reader: Reader) -> None:
    """`TTRACE_SHOTS=1` writes the transcript anew; numbers differ from machine to machine."""
    done = reader.follow(TUTORIAL)
    assert len(done) <= 6
    assert sum(ran.seconds for _, _, ran in done) < 120 * measure_slowness()
    text = "".join(f"$ {command}\n{ran.output}\n" for command, _, ran in done)
    if os.environ.get("TTRACE_SHOTS"):
        TRANSCRIPT.write_text(text)
    assert without_numbers(text) == without_numbers(TRANSCRIPT.read_text())


def without_numbers(text: str) -> list[str]:
    """What does not depend on how a machine rounds: neither digits nor bars, nor which elements are the worst."""
    lines = re.sub(r"[-+\d.e]*\d[-+\d.e]*|[▁-▇]", "#", text).splitlines()
    return [" ".join(line.split()) for line in lines if not re.match(r"\(#, #\)", line)]


@pytest.mark.parametrize("page", [TUTORIAL, *(DOCS / "howto").glob("*.md")], ids=lambda page: page.stem)
def test_fragments_of_code_are_parts_of_files_that_run(page: Path) -> None:
    files = [path for folder in ("examples", "src", "zoo", "tests") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text() for path in files]
    for block in blocks(page):
        if block.language == "python" and not block.title:
            assert any(is_part_of(block.text, text) for text in texts), block.text
        assert block.language, f"{page}: a block without a language is neither run nor checked:\n{block.text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", [*PAGES, *FORMS], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text()
    parsers = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group, as the app has commands
    removed = REMOVED.get(page.name, set())
    assert set(re.findall(r"(?:`|\$ )ttrace ([a-z]+(?:-[a-z]+)*)", text)) - removed <= set(parsers)
    known = {option for parser in parsers.values() for param in parser.params for option in param.opts}
    known |= {option for parser in parsers.values() for param in parser.params for option in param.secondary_opts}
    used = {
        word for line in re.findall(r"(?:`|\$ )(ttrace [^`\n]*)", text) for word in re.findall(r" (--[a-z-]+)", line)
    }
    theirs = {
        "--bug",
        "--stage",
        "--nproc-per-node",
        "--standalone",
        "--tp",
        "--sp",
        "--load",
        "--save",
        "--forget",
        "--generate",
        "--prefill",
        "--port",
        "--limits",
        "--version",
        "--install-completion",
        "--show-completion",
        "--help",
    }
    assert used - theirs - removed <= known


@pytest.mark.parametrize("form", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_every_form_asks_for_the_output_of_the_doctor(form: Path) -> None:
    assert "`ttrace doctor`" in form.read_text()


def test_an_agent_is_told_of_fields_that_reports_have() -> None:
    """SKILL.md has the head that agents look for, and names what `--json` prints."""
    text = (ROOT / "SKILL.md").read_text()
    assert re.match(r"---\nname: ttrace\ndescription: .{50,1024}\n---\n", text)
    cause = Cause(CauseName.UNEXPLAINED, "x")
    comparison = Comparison(TensorId.parse("0/0/a/output"), Verdict.FAIL)
    report = json_report.as_json(Judgement((comparison,), (Finding(comparison, "a", "", cause, 0),), ()), "")
    (read,) = re.findall(r"Read (.*?)\. Fix", text, re.S)
    assert set(re.findall(r"`(\w+)`", read)) <= set(report["findings"][0])
    assert {"problems", "findings"} <= set(report)


def test_the_site_names_every_page() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_site_and_changelog_name_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"site_name: TTrace {version.rpartition('.')[0]} " in (ROOT / "mkdocs.yml").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert not [name for name in ttrace.__all__ if f"ttrace.{name}" not in text]
    assert not [name for name in ("step", "batch", "close") if f"session.{name}" not in text]
