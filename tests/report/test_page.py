"""Check the HTML file without a browser: contents, sizes, content security policy."""

import base64
import json
import re
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ipu_dynamo.report
from ipu_dynamo.report.html_page import html_page, write_report
from ipu_dynamo.report.views.compact import pack, stem_and_number
from ipu_dynamo.report.views.memory_view import ipu_bars
from ipu_dynamo.report.views.page_view import page_view
from tests.report.predictions import drawn_prediction

HOSTILE = "</script><img src=x onerror=alert(1)>"
ASSETS = Path(ipu_dynamo.report.__file__).parent / "assets"


class Elements(HTMLParser):
    """The elements of a page, with the text of those that hold text only."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), ""))

    def handle_endtag(self, tag):
        self.found.append(("", {}, ""))  # text that follows is not the element's

    def handle_data(self, data):
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = tag, attributes, text + data


def elements(page: str, tag: str) -> list[tuple[dict[str, str | None], str]]:
    return [(attributes, text) for name, attributes, text in Elements(page).found if name == tag]


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


@pytest.fixture(scope="module")
def page():
    return html_page(drawn_prediction())


def test_the_policy_allows_the_own_scripts_and_style_by_hash_and_nothing_else(page):
    (policy,) = [a["content"] for a, _ in elements(page, "meta") if "http-equiv" in a]
    rules = {name: values for name, *values in map(str.split, policy.split(";"))}
    scripts = [text for attributes, text in elements(page, "script") if "type" not in attributes]
    assert rules == {
        "default-src": ["'none'"],
        "script-src": [hash_of(text) for text in scripts],
        "style-src": [hash_of(text) for _, text in elements(page, "style")],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert len(scripts) == 2


def test_no_element_names_an_address_or_runs_an_attribute(page):
    for tag, attributes, _ in Elements(page).found:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        for name in attributes:
            assert name not in ("src", "href", "action", "style")
            assert not name.startswith("on")


def test_no_address_outside_is_in_the_file_except_in_the_comment_of_the_library(page):
    addresses = re.findall(r"\w+://[^\s\"'`)]+", page)
    assert addresses == ["https://github.com/leeoniya/uPlot"]
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize("where", ["module", "line", "model"])
def test_names_are_text(where):
    page = html_page(drawn_prediction(**{where: HOSTILE}))
    assert "<img" not in page
    assert [tag for tag, _, _ in Elements(page).found].count("script") == 3
    ((_, text),) = [e for e in elements(page, "script") if "type" in e[0]]
    assert HOSTILE in json.dumps(json.loads(text))


@given(st.text(alphabet=st.sampled_from("<>&!-/scriptSCRIPT\u2028\"'\\"), min_size=1, max_size=40))
def test_no_name_leaves_the_data(name):
    prediction = replace(drawn_prediction(ipus=1, rows=1), model=name)
    page = html_page(prediction)
    ((_, text),) = [e for e in elements(page, "script") if "type" in e[0]]
    assert json.loads(text)["title"] == f"{name} on bow-pod4"
    assert not set("<>&\u2028") & set(text)


def test_viewer_and_library_are_small():
    files = [file for file in ASSETS.rglob("*") if file.name != "LICENSE" and file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 120 * 1024


def test_many_operators_and_steps_make_a_small_file():
    prediction = drawn_prediction(ipus=2, rows=2500, layers=5)
    assert len({row.operands for row in prediction.operators}) == 2500
    steps = [len(prediction.blocks[call.block].operators) for call in prediction.calls]
    assert (len(prediction.operators), sum(steps)) == (5000, 50_000)
    assert len(html_page(prediction).encode()) <= 1_500_000


def test_an_operator_of_a_layer_more_takes_a_few_bytes():
    few, many = (drawn_prediction(layers=layers) for layers in (12, 48))
    added = sum(
        len(p.blocks[c.block].operators) * s for p, s in ((many, 1), (few, -1)) for c in p.calls
    )
    assert added == 5760
    assert len(html_page(many)) - len(html_page(few)) < 3 * added


def test_the_library_is_the_one_that_its_file_names():
    folder = ASSETS / "uplot"
    read = (folder / "README.md").read_text()
    (version,), (digest,) = re.findall(r"version (\S+),", read), re.findall(r"[0-9a-f]{64}", read)
    library = (folder / "uPlot.iife.min.js").read_bytes()
    assert f"(v{version})".encode() in library[:100]
    assert sha256(library).hexdigest() == digest
    assert "MIT License" in (folder / "LICENSE").read_text()


def test_the_file_is_written_as_a_whole(tmp_path, page):
    file = tmp_path / "report.html"
    write_report(drawn_prediction(), file)
    assert file.read_text() == page
    with pytest.raises(OSError, match="missing"):
        write_report(drawn_prediction(), tmp_path / "missing" / "report.html")


def unpacked(packed: str) -> list[int]:
    """The inverse of `pack`, by its description."""
    content, numbers, last = iter(base64.b64decode(packed)), [], 0

    def varint(byte: int) -> int:
        return byte if byte < 128 else byte - 128 + 128 * varint(next(content))

    for first in content:
        number = varint(first)
        change = (-1 if number & 2 else 1) * (number >> 2)
        for _ in range(1 + (varint(next(content)) if number & 1 else 0)):
            last += change
            numbers.append(last)
    return numbers


@given(st.lists(st.integers(-(2**50), 2**50) | st.integers(0, 2)))
def test_packed_numbers_are_read_back(numbers):
    assert unpacked(pack(numbers)) == numbers


@given(st.text(alphabet="a_0123٣", max_size=12))
def test_a_stem_and_its_number_are_the_name(name):
    stem, number = stem_and_number(name)
    assert stem + ("" if number < 0 else str(number)) == name


def test_of_many_ipus_the_fullest_and_slowest_come_first():
    prediction = drawn_prediction(ipus=40, rows=1)
    slow = replace(prediction.ipus[33].cycles, copies=10**9)
    ipus = list(prediction.ipus)
    ipus[33] = replace(ipus[33], cycles=slow)
    bars = ipu_bars(replace(prediction, ipus=tuple(ipus)))
    shown = {i for i, bar in enumerate(bars) if bar["first"]}
    assert {0, 1, 33} <= shown
    assert len(shown) == 16


def test_bytes_of_a_bar_are_its_peak():
    prediction = drawn_prediction(used=1.2)
    for bar, ipu in zip(ipu_bars(prediction), prediction.ipus, strict=True):
        assert sum(bar["bytes"]) == bar["always"] + bar["rest"] == ipu.memory.total.central


def test_the_peak_is_where_most_bytes_are():
    view = page_view(drawn_prediction())
    for number, ipu in enumerate(drawn_prediction().ipus):
        steps = [
            call.held + a + t
            for call in ipu.memory.calls
            for block in [ipu.memory.blocks[call.memory_block]]
            for a, t in zip(block.activations, block.temporaries, strict=True)
        ]
        at = view["memory"][number]["peak"]
        assert steps[at] == ipu.memory.total.central - ipu.memory.always_live.central
