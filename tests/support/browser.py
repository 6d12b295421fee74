"""Reports opened in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

DESKTOP, PHONE = (1280, 800), (390, 844)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's own Chromium: Playwright would download another."""
    path = shutil.which("chromium")
    assert path is not None, "these tests need Chromium: apt-get install chromium, as .ci/run does"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS.split())
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A report in a window, with its error messages and the addresses that it tried to load."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def scrolled(self) -> None:
        """Scroll down the whole page and back, so that everything is drawn."""
        self.page.evaluate(
            "async () => { for (let y = 0; y < document.body.scrollHeight; y += 500) "
            "{ scrollTo(0, y); await new Promise(requestAnimationFrame); } scrollTo(0, 0); }"
        )


@contextmanager
def opened(
    browser: Browser, path: Path, size: tuple[int, int] = DESKTOP, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    try:
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri(), wait_until="commit")
        found.page.wait_for_selector("body[data-ready]")
        yield found
    finally:
        context.close()
