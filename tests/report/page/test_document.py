"""The HTML report in a browser: what a person sees first, at any size, of any model, and that it loads nothing.

All of it takes about 15 seconds. The images it is held against are made by `TTRACE_SHOTS=1 pytest tests/report`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Locator

from tests.support.browser import DESKTOP, PHONE, chromium, opened
from tests.support.judgements import large
from tests.support.traces import Case, draw_tensor, nudge
from ttrace.judge.verdict import Judgement
from ttrace.report.page.contents import About, build_page
from ttrace.report.page.document import render_document
from ttrace.trace.seal import seal_document

SHOTS = Path(__file__).parent / "shots"
FIGURE = Path(__file__).parents[3] / "docs" / "howto" / "figures" / "report.png"
NAME = "<!--<script>window.owned=1;\"'&lt;{{REST}}"
"""A name has neither blanks nor slashes."""
TEXT = "</script><script>window.owned=1</script><img src=x onerror=window.owned=1>"
NEXT = "ttrace diff runs/a 0/0/layers.2.fc1/output"
POWER = "What this run could have found"

pytestmark = pytest.mark.slow  # a browser, which watches the clock


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def written(folder: Path, judgement: Judgement, about: About | None = None) -> Path:
    path = folder / "report.html"
    path.write_text(render_document(build_page(judgement, about or About("runs/a", NEXT))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers; in one of them a rank's half of the columns is wrong, and replicas differ after it."""
    folder = tmp_path_factory.mktemp("failing")
    case = Case(folder, "tp=2", parameters={f"layers.{i}.fc1.weight": True for i in range(6)})
    for i in range(6):
        full = draw_tensor(16, 64, seed=i)
        noise = 2e-7 * (i + 1)
        rounded = partial(nudge, size=noise, seed=i)
        wrong = {2: _half_wrong, **dict.fromkeys((3, 4, 5), lambda x: x + 1e-3 * draw_tensor(*x.shape, seed=9))}
        case.add(f"0/0/layers.{i}/input", full, change=rounded, noise=noise)
        case.add(f"0/0/layers.{i}.fc1/output", full, "a b/tp", wrong.get(i, rounded), noise=noise)
        case.add(f"0/-/layers.{i}.fc1.weight/param_grad", full, "a b/tp")
        case.add(f"0/-/layers.{i}.fc1.weight/update", full, "a b/tp", noise=1e-3)
        case.add(f"0/-/layers.{i}.fc1.weight/param_after", full, "a b/tp")
    case.add_trusted("0/0/./loss", draw_tensor(1))
    case.candidate.record(0, "0/0/./loss", draw_tensor(1), "...")
    case.candidate.record(1, "0/0/./loss", 2 * draw_tensor(1), "...")
    case.add_trusted("0/0/gone/output", draw_tensor(4, 8))
    judgement = case.judge()
    for role, command, git in (
        ("reference", "python", "1a2b3c4d5e6f7a8b"),
        ("candidate", "torchrun", "9f8e7d6c5b4a3b2c"),
    ):
        mark = {"command": [command, "train.py"], "time": "2026-11-16T05:53:15+00:00", "git": git}
        (folder / f"{role}.done.json").write_text(seal_document(json.dumps(mark)))
    return written(folder, judgement, replace(About.of(folder, NEXT), title="runs/a"))


def _half_wrong(x):  # type: ignore[no-untyped-def]  # a tensor to a tensor
    y = x.clone()
    y[:, 32:] *= 1.5
    return y


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("passing"), large(12, 2))


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    judgement = large(136, 20, wrong_from=70)
    assert len(judgement.comparisons) >= 100_000
    return written(tmp_path_factory.mktemp("huge"), judgement)


def is_in_sight(locator: Locator, size: tuple[int, int]) -> bool:
    box = locator.bounding_box()
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= size[1]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["failing", "passing", "huge"])
def test_a_report_tells_the_finding_at_once_and_loads_nothing(
    browser: Browser, request: pytest.FixtureRequest, name: str, size: tuple[int, int]
) -> None:
    path: Path = request.getfixturevalue(name)
    with opened(browser, path, size, "dark" if size == PHONE else "light") as found:
        first = found.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert first < 2000  # the verdict, for 100,000 tensors too
        told = [".verdict", ".rest", ".next code", *([] if name == "passing" else ["h1 .site", ".cause"])]
        assert all(is_in_sight(found.page.locator(each).first, size) for each in told)
        compared_with_shot(found.page.screenshot(), f"{name}-{size[0]}")
        found.scrolled()
        assert found.page.locator(".panels canvas").count() >= 3
        assert found.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert (found.complaints, found.requests) == ([], [path.as_uri()])


def compared_with_shot(png: bytes, name: str) -> None:
    """Held against the kept image, both small: fonts differ between machines, the page does not."""
    kept = SHOTS / f"{name}.png"
    SHOTS.mkdir(exist_ok=True)
    fresh = SHOTS / f"{name}.new.png"
    fresh.write_bytes(png)
    with Image.open(fresh) as image:
        seen = image.convert("RGB")
    if os.environ.get("TTRACE_SHOTS"):
        seen.quantize(96).save(kept, optimize=True)
        if name == "failing-1280":
            shutil.copy(kept, FIGURE)
    with Image.open(kept) as image:
        known = image.convert("RGB")
    assert seen.size == known.size
    small = (known.width // 20, known.height // 20)
    difference = ImageChops.difference(
        seen.resize(small, Image.Resampling.BOX), known.resize(small, Image.Resampling.BOX)
    )
    assert max(ImageStat.Stat(difference).mean) < 3, f"the page looks different: compare {fresh} with {kept}"
    fresh.unlink()


def test_the_page_says_cause_maps_conflicts_coverage_and_commands(browser: Browser, failing: Path) -> None:
    with opened(browser, failing) as found:
        found.scrolled()
        text = found.page.locator("body").inner_text()
        assert found.page.locator("h1 .site").inner_text() == "layers.2.fc1/output"
        titles = ["Modules", "Where the error lies", "Replicas that differ, by axis", "Coverage", POWER, "The run"]
        assert all(title in text for title in titles)
        assert "the candidate has no such tensor" in text
        # Rank 0 has the left half, which is right; rank 1 the right half. Where a rank holds nothing, nothing is drawn.
        drawn_blocks = found.page.evaluate(
            "[...document.querySelectorAll('.map canvas')].slice(0, 2).map((c) => { const p = "
            "c.getContext('2d').getImageData(0, 0, c.width, 1).data; return [p.at(0), p.at(3), p.at(-4), p.at(-1)]; })"
        )
        assert [(row[1], row[3]) for row in drawn_blocks] == [(255, 0), (0, 255)]
        assert drawn_blocks[0][0] < 50 < 200 < drawn_blocks[1][2]


def test_the_page_says_what_made_both_traces(browser: Browser, failing: Path) -> None:
    with opened(browser, failing) as found:
        where = found.page.locator(".where").inner_text()
        assert "2026-11-16 05:53 UTC" in where
        assert "reference at commit 1a2b3c4d5e6f, candidate at commit 9f8e7d6c5b4a" in where
        run = found.page.locator("section", has=found.page.locator("h2", has_text="The run")).inner_text()
        assert all(text in run for text in ("python train.py", "torchrun train.py", "1a2b3c4d5e6f", "9f8e7d6c5b4a"))
        assert "2026-11-16 05:53 UTC\tthe same" in run


def test_each_kind_of_update_has_one_tolerance_line(browser: Browser, failing: Path) -> None:
    with opened(browser, failing) as found:
        found.scrolled()
        lines = found.page.evaluate("[...plots.at(-1).lines].map(([kind, points]) => [kind, points.map(([, y]) => y)])")
        assert [kind for kind, _ in lines] == ["update", "param_after"]
        (low, high), (after_low, after_high) = ((min(ys), max(ys)) for _, ys in lines)
        assert high < 2 * low
        assert after_high < 2 * after_low
        assert low > 100 * after_high


def test_exact_zeros_have_a_row_of_their_own(browser: Browser, failing: Path) -> None:
    with opened(browser, failing) as found:
        found.scrolled()
        zeros, others, label = found.page.evaluate(
            "(() => { const u = plots.at(-1), ys = u.data[1].filter((y) => y !== null), axis = u.axes[1], "
            "ticks = axis.splits(u), zeros = ys.filter((y) => y === u.zero); "
            "return [zeros.length, ys.length - zeros.length, axis.values(u, ticks)[ticks.indexOf(u.zero)]]; })()"
        )
        assert (zeros, others, label) == (12, 0, "0")
        decades = found.page.evaluate("plots.at(-1).axes[1].splits().slice(1)")
        assert found.page.evaluate("plots.at(-1).zero") < min(decades) / 2


def test_the_root_has_a_name(browser: Browser, tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.add_right("0/0/./input", "0/0/a/output", "0/0/./output")
    with opened(browser, written(tmp_path, case.judge(), About.of(tmp_path, ""))) as found:
        found.scrolled()
        tree = found.page.locator(".tree .row .label").all_inner_texts()
        assert tree == ["Module", "a", "input", "output"]  # its class
        assert found.page.evaluate("plots[0].axes[0].values(plots[0], [0, 1, 2])") == ["Module", "a", "Module"]


@pytest.mark.parametrize(("name", "is_worst_first"), [("failing", True), ("passing", False)])
def test_the_list_of_a_failed_run_begins_with_the_worst(
    browser: Browser, request: pytest.FixtureRequest, name: str, is_worst_first: bool
) -> None:
    with opened(browser, request.getfixturevalue(name)) as found:
        found.scrolled()
        assert found.page.get_by_label("worst first").is_checked() is is_worst_first
        ratios = found.page.evaluate("chooseRows().map(ratioOf).filter((ratio) => !Number.isNaN(ratio))")
        assert (ratios == sorted(ratios, reverse=True)) is is_worst_first
        assert found.page.locator(".heads span:last-child").all_inner_texts() == ["error / tolerance"] * 2


@pytest.mark.parametrize(("name", "is_above"), [("failing", False), ("passing", True)])
def test_what_a_clean_run_could_have_found_is_above_the_plots(
    browser: Browser, request: pytest.FixtureRequest, name: str, is_above: bool
) -> None:
    with opened(browser, request.getfixturevalue(name)) as found:
        titles = found.page.locator("h2").all_inner_texts()
        assert (titles.index(POWER) < titles.index("Along the depth of the model")) is is_above
        power = found.page.locator("section", has=found.page.locator("h2", has_text=POWER))
        assert power.locator("th").all_inner_texts()[:4] == ["kind", "tensors", "median", "worst"]


def test_backticks_become_code(browser: Browser, tmp_path: Path) -> None:
    case = Case(tmp_path, notes=("try `ttrace lint` and `a`",))
    case.add_right("0/0/a/output")
    with opened(browser, written(tmp_path, case.judge())) as found:
        found.scrolled()
        assert "`" not in found.page.locator("body").inner_text()
        codes = found.page.locator("section code").all_inner_texts()
        assert {"ttrace selftest", "ttrace lint", "a"} <= set(codes)


def test_marks_filters_and_trees_open_what_is_behind_them(browser: Browser, huge: Path) -> None:
    with opened(browser, huge) as found:
        found.page.locator(".chip", has_text="UNJUDGED").click()
        found.page.wait_for_function("document.querySelectorAll('.list .row').length > 5")
        assert (
            found.page.locator(".list .row .mark").all_inner_texts() == ["?"] * found.page.locator(".list .row").count()
        )
        found.page.locator(".bar select").select_option("")
        found.page.get_by_label("worst first").uncheck()
        found.page.locator(".bar input[type=search]").fill("layers.135.attn.proj/grad_input")
        assert found.page.locator(".list .row").count() <= 60  # only what is in sight
        found.page.locator(".list .row").first.click()
        assert found.page.locator("#card .site").inner_text() == "0/0/layers.135.attn.proj/grad_input"
        assert found.page.locator(".tree .row[aria-expanded=true] .label").all_inner_texts() == [
            "model",
            "layers",
            "70",
            "attn",
            "proj",
        ]
        assert found.complaints == []


def test_pointing_at_a_mark_names_its_tensor_and_dragging_zooms(browser: Browser, failing: Path) -> None:
    with opened(browser, failing) as found:
        over = found.page.locator(".u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        places = found.page.evaluate("page.places")
        x = box["x"] + (places.index("layers.2.fc1") + 0.6) / (len(places) + 0.2) * box["width"]
        tip = found.page.locator(".tip").first
        for y in range(0, int(box["height"]), 5):
            found.page.mouse.move(x, box["y"] + y)
            if tip.is_visible():
                break
        assert tip.inner_text().startswith("✗ 0/0/layers.2.fc1/output")
        found.page.mouse.down()
        found.page.mouse.up()
        assert found.page.locator("#card .site").inner_text() == "0/0/layers.2.fc1/output"
        found.page.locator("#card .close").click()
        found.page.mouse.move(x, box["y"] + 40)
        found.page.mouse.down()
        found.page.mouse.move(x + 200, box["y"] + 40, steps=4)
        found.page.mouse.up()
        assert found.page.evaluate("plots.map((each) => each.scales.x.min)") == pytest.approx([5.0] * 3, abs=0.1)
        assert found.complaints == []


def test_scrolling_through_all_tensors_stays_fluid(browser: Browser, huge: Path) -> None:
    with opened(browser, huge) as found:
        found.scrolled()
        frames = found.page.evaluate(
            "async () => { const list = document.querySelector('.list'), times = []; let last = performance.now(); "
            "for (let k = 0; k < 60; k++) { list.scrollTop = k * 40000; await new Promise(requestAnimationFrame); "
            "times.push(performance.now() - last); last = performance.now(); } return times.sort((a, b) => a - b); }"
        )
        assert frames[len(frames) // 2] < 100
        assert found.page.locator(".list .row").count() < 60


def test_text_of_traces_never_becomes_markup(browser: Browser, tmp_path: Path) -> None:
    case = Case(tmp_path, notes=(f"note {TEXT}",))
    case.add_wrong(f"0/0/{NAME}/output")
    case.add_trusted(f"0/0/x{NAME}/output", draw_tensor(4, 8))
    path = written(tmp_path, case.judge(), About.of(tmp_path, f"ttrace diff '{TEXT}'"))
    with opened(browser, path) as found:
        found.scrolled()
        found.page.locator(".list .row").first.click()
        assert found.page.evaluate("window.owned") is None
        assert found.page.locator("img").count() == 0
        assert found.page.locator("h1 .site").inner_text() == f"{NAME}/output"
        assert (found.complaints, found.requests) == ([], [path.as_uri()])
