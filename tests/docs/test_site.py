"""Build the guide's site, and look at each page in headless Chromium."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import pytest

from tests.docs.guide import FOLDER, PAGES
from tests.docs.public_names import PACKAGES
from tests.docs.reference import names_page, pages
from tests.report.browser import Tab, playwrights, tabs

pytestmark = pytest.mark.slow

_LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        """Write nothing."""


@pytest.fixture(scope="module")
def address(site):
    """The address of a server of the site on this computer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    for playwright in playwrights():
        for tab in tabs(playwright):
            yield tab.page.context.browser


def test_each_public_name_has_an_anchor(site):
    for page in PACKAGES:
        html = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        entries = re.findall(r"^::: (\S+)$", names_page(page), re.MULTILINE)
        assert {*entries} <= {*re.findall(r'id="([\w.]+)"', html)}, page


def test_pages_name_no_file_of_another_host(site):
    files = sorted(site.rglob("*.html"))
    assert len(files) > len(PAGES)
    found = {str(file): _LOADED.findall(file.read_text(encoding="utf-8")) for file in files}
    assert {file: urls for file, urls in found.items() if urls} == {}


@pytest.mark.parametrize(("width", "scheme"), [*product((1200, 400), ("light", "dark"))])
def test_pages_open_without_a_message_or_a_request(browser, address, width, scheme):
    size = {"width": width, "height": 800}
    tab = Tab(browser.new_page(viewport=size, color_scheme=scheme))
    for name in sorted([*(page.name for page in PAGES), *pages()]):
        tab.messages.clear()
        tab.requests.clear()
        tab.page.goto(f"{address}/{name.removesuffix('.md')}.html", wait_until="load")
        colours = tab.page.locator("body").get_attribute("data-md-color-scheme")
        assert colours == ("default" if scheme == "light" else "slate"), name
        assert tab.page.locator("h1").count() == 1, name
        for picture in tab.page.locator("article img:visible").all():
            assert f"#only-{scheme}" in picture.get_attribute("src"), name
            assert picture.evaluate("image => image.complete && image.naturalWidth > 0"), name
        wider = tab.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{name} is {wider} pixels wider than the window"
        assert tab.messages == [], name
        assert [url for url in tab.requests if not url.startswith(address)] == [], name
        assert tab.requests, name
    tab.page.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [("SerializeMatmul", "reference/passes.html"), ("IPU_DYNAMO_WITHOUT", "environment.html")],
)
def test_a_search_finds_a_page(browser, address, words, page):
    tab = browser.new_page(viewport={"width": 1200, "height": 800})
    tab.goto(f"{address}/index.html")
    tab.locator("input.md-search__input").fill(words)
    result = tab.locator(f"a.md-search-result__link[href*='{page}']").first
    result.wait_for(state="attached", timeout=120_000)
    result.click()
    tab.wait_for_url(f"**/{page}*")
    tab.close()
