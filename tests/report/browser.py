"""Open reports in headless Chromium, through playwright; skip tests where there is none."""

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HINT = (
    "no Chromium: install Debian's chromium-headless-shell, or let IPU_DYNAMO_CHROMIUM name a file"
)
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The file of a Chromium; without one, the test is skipped."""
    named = os.environ.get("IPU_DYNAMO_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None or not Path(found).exists():
        pytest.skip(HINT if named is None else f"IPU_DYNAMO_CHROMIUM names no file: {named}")
    return found


class Tab:
    """A report in a browser. Messages, errors and requests of the page are kept.

    Args:
        page: of playwright.
    """

    def __init__(self, page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, file: Path, fragment: str = "") -> None:
        """Open a report; the page is drawn afterwards."""
        self.page.goto("about:blank")
        self.requests.clear()
        self.page.goto(f"file://{file}{fragment}")

    def rows(self, table: str, which: str = ":not(.spacer)") -> list[dict[str, str]]:
        """The cells by heading, of the rows of a table that are in the page."""
        heads = self.page.locator(f"#{table}-rows th").all_inner_texts()
        rows = self.page.locator(f"#{table}-rows tbody tr{which}").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
        )
        return [dict(zip(heads, row, strict=True)) for row in rows]

    def chosen(self, table: str) -> list[dict[str, str]]:
        """The cells of the rows that are selected."""
        return self.rows(table, "[aria-selected=true]")

    def text(self, selector: str) -> str:
        """The text of an element."""
        return self.page.locator(selector).inner_text()

    def selection(self) -> dict[str, str]:
        """The selection in the URL."""
        fragment = self.page.evaluate("location.hash.slice(1)")
        return dict(pair.split("=", 1) for pair in fragment.split("&") if pair)


def playwrights() -> Iterator[Any]:
    """Playwright; without it, or without a Chromium, the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium()
    with sync_api.sync_playwright() as playwright:
        yield playwright


def tabs(playwright: Any, **options: Any) -> Iterator[Tab]:
    """A tab of a new browser.

    Args:
        options: of the browser's launch, such as `env`.
    """
    browser = playwright.chromium.launch(executable_path=chromium(), **options)
    try:
        yield Tab(browser.new_page(viewport={"width": 1200, "height": 800}))
    finally:
        browser.close()


def screenshot(page: str, *, dark: bool, width: int = 1200, height: int = 800) -> str:
    """The first screen of an HTML page, as an SVG picture that holds its pixels.

    Args:
        page: its text.
        dark: which colours the reader prefers.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        for playwright in playwrights():
            for tab in tabs(playwright):
                tab.page.set_viewport_size({"width": width, "height": height})
                tab.page.emulate_media(color_scheme="dark" if dark else "light")
                tab.open(file)
                tab.page.wait_for_load_state("networkidle")
                pixels = base64.b64encode(tab.page.screenshot()).decode("ascii")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n'
        f'<image width="{width}" height="{height}" href="data:image/png;base64,{pixels}"/>\n</svg>'
    )
