"""Check reports in a browser: contents, selection, keyboard, URL."""

import os
import re

import pytest

from ipu_dynamo.machine.text import headline
from ipu_dynamo.report.html_page import write_report
from ipu_dynamo.runtime.execute.timeline import Span, Timeline
from tests.report.browser import playwrights, tabs
from tests.report.predictions import drawn_prediction, empty_prediction

CASES = {
    "small": {},
    "many operators": {"rows": 150, "layers": 12, "ipus": 2},
    "does not fit": {"used": 1.3},
    "many IPUs": {"ipus": 40, "rows": 4},
    "nothing": None,
}
SECTIONS = ["Peak", "Operators", "Where cycles go", "Timeline", "Machine", "How it was made"]
HOSTILE = "</script><img src=x onerror=alert(1)>"


def prediction_of(case):
    options = CASES[case]
    return empty_prediction() if options is None else drawn_prediction(**options)


def number(text):
    return int(text.replace(",", ""))


@pytest.fixture(scope="module")
def playwright():
    yield from playwrights()


@pytest.fixture(scope="module")
def tab(playwright):
    yield from tabs(playwright)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name in CASES:
        write_report(prediction_of(name), folder / f"{name}.html")
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_a_report_opens_without_a_message_or_a_request(tab, files, case):
    tab.messages.clear()
    tab.open(files / f"{case}.html")
    assert tab.page.locator("h2").all_inner_texts() == SECTIONS
    assert tab.messages == []
    assert tab.requests == [f"file://{files}/{case}.html".replace(" ", "%20")]
    assert tab.page.locator("tr").count() <= 400


@pytest.mark.parametrize("case", CASES)
def test_the_first_screen_needs_no_scrolling(tab, files, case):
    tab.open(files / f"{case}.html")
    prediction = prediction_of(case)
    assert tab.text("h1") == headline(prediction)
    labels = tab.page.locator("dt").all_inner_texts()
    assert {"Items/s", "Idle", "Re-layout", "Replicas", "Micro-batches"} <= {*labels}
    assert tab.page.locator(".ipus tbody tr").count() == min(16, len(prediction.ipus))
    limits = tab.page.locator(".limits")
    assert limits.inner_text() == prediction.limits
    box = limits.bounding_box()
    assert box["y"] + box["height"] <= 800
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_rest_of_many_ipus_is_shown_on_request(tab, files):
    tab.open(files / "many IPUs.html")
    tab.page.get_by_role("button", name="Show the other 24 IPUs").click()
    assert tab.page.locator(".ipus tbody tr").count() == 40


def test_a_bar_shows_the_categories_the_limit_and_the_fullest_tile(tab, files):
    tab.open(files / "does not fit.html")
    bar = tab.page.locator(".ipus .bar").first
    whole = bar.bounding_box()["width"]
    parts = [part.bounding_box()["width"] / whole for part in bar.locator(".part").all()]
    memory = drawn_prediction(used=1.3).ipus[0].memory
    scale = parts[0] / memory.categories[0].nbytes.central
    shares = [scale * category.nbytes.central for category in memory.categories]
    assert parts == pytest.approx(shares, abs=0.01)
    left = bar.bounding_box()["x"]
    at = {kind: bar.locator(f".{kind}").bounding_box()["x"] - left for kind in ("limit", "fullest")}
    assert at["limit"] / whole == pytest.approx(scale * memory.limit, abs=0.01)
    assert at["limit"] < at["fullest"] < whole


def test_a_table_sorts_by_its_heads(tab, files):
    tab.open(files / "many operators.html")
    cycles = [number(row["Cycles"]) for row in tab.rows("operators")]
    assert cycles == sorted(cycles, reverse=True)
    tab.page.locator("#operators-rows").get_by_text("Cycles", exact=True).click()
    least = [number(row["Cycles"]) for row in tab.rows("operators")]
    assert least == sorted(least)
    assert least[0] < cycles[0]
    assert tab.selection()["operators.sort"] == "cycles"


def test_a_table_shows_the_rows_in_sight_of_all(tab, files):
    tab.open(files / "many operators.html")
    assert tab.text("#operators .status") == "300 rows"
    assert len(tab.rows("operators")) < 60
    first = tab.rows("operators")[0]
    tab.page.evaluate("document.getElementById('operators-rows').scrollTop = 1e6")
    tab.page.wait_for_function(
        "document.querySelector('#operators-rows tbody tr:last-child').ariaRowIndex === '301'"
    )
    assert first not in tab.rows("operators")


def test_a_table_filters_and_groups(tab, files):
    tab.open(files / "many operators.html")
    tab.page.get_by_label("Filter Operators", exact=True).fill("softmax backward")
    assert {(row["Operator"], row["Direction"]) for row in tab.rows("operators")} == {
        ("aten._softmax.default", "backward")
    }
    tab.page.get_by_label("Filter Operators", exact=True).fill("")
    tab.page.get_by_label("Group Operators by").select_option("operator")
    groups = tab.rows("operators")
    assert {row["Operator"].split()[1] for row in groups} == {
        f"aten.{name}" for name in ("mm.default", "add.Tensor", "gelu.default", "_softmax.default")
    }
    prediction = prediction_of("many operators")
    total = sum(row.cycles.total * row.count * 16 for row in prediction.operators)
    assert sum(number(row["Cycles"]) for row in groups) == total
    tab.page.locator("#operators-rows tbody tr").first.click()
    first, *members = tab.rows("operators")
    assert len(members) > 20
    assert {row["Operator"] for row in members} == {first["Operator"].split()[1]}


def test_a_row_with_a_count_has_the_cycles_of_all_its_runs(tab, files):
    tab.open(files / "small.html")
    first = tab.rows("operators")[0]
    prediction = drawn_prediction()
    costliest = max(prediction.operators, key=lambda row: row.cycles.total)
    runs = 16 * costliest.count
    assert first["Operator"] == costliest.operator
    assert number(first["Runs"]) == runs
    assert number(first["Cycles"]) == runs * costliest.cycles.total
    assert number(first["Wasted"]) == runs * (costliest.cycles.total - costliest.bound)


def test_to_the_peak_selects_its_step_in_all_sections(tab, files):
    tab.open(files / "small.html")
    assert "step" not in tab.selection()
    tab.page.get_by_role("button", name="To the peak").click()
    selection = tab.selection()
    assert "(the peak)" in tab.text("#step-status")
    memory = drawn_prediction().ipus[0].memory
    assert int(selection["step"]) == 60 + memory.peak.step
    (row,) = tab.chosen("operators")
    assert row["Operator"] in tab.text("#step-status")
    (call,) = tab.chosen("calls")
    assert call["Call"] == "0B"
    assert tab.page.locator(".span.chosen").count() == 1


def test_the_chart_and_its_table_follow_the_arrow_keys(tab, files):
    tab.open(files / "small.html")
    tab.page.get_by_role("button", name="To the peak").click()
    at = int(tab.selection()["step"])
    tab.page.locator("#memory-chart").focus()
    tab.page.keyboard.press("ArrowLeft")
    assert int(tab.selection()["step"]) == at - 1
    memory = drawn_prediction().ipus[0].memory
    block, step = memory.blocks[1], at - 1 - 60
    live = [v for v in block.lifetimes if v.made <= step and (v.last < 0 or step <= v.last)]
    shown = [row["Tensor"] for row in tab.rows("tensors") if row["Category"] == "activations"]
    assert sorted(shown) == sorted(["v_0", *(value.name for value in live)])  # v_0 is held
    tab.page.keyboard.press("Home")
    assert tab.selection()["step"] == "0"


def test_an_operator_chosen_by_keyboard_selects_its_step(tab, files):
    tab.open(files / "small.html")
    tab.page.locator("#operators-rows").focus()
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Enter")
    (row,) = tab.chosen("operators")
    assert row == tab.rows("operators")[1]
    assert {"ipu", "operator", "step"} <= tab.selection().keys()
    assert row["Operator"] in tab.text("#step-status")


def test_an_ipu_chosen_in_one_section_is_chosen_in_all(tab, files):
    tab.open(files / "small.html")
    tab.page.locator(".ipus").get_by_role("button", name="IPU 2").click()
    assert tab.page.locator("#peak-ipu").input_value() == "2"
    assert [row["IPU"] for row in tab.chosen("cycles")] == ["IPU 2"]
    assert "IPU 2" in tab.text("#tile-profile")
    assert tab.page.locator(".lane.chosen .track").inner_text() == "IPU 2"


def test_every_control_is_reached_by_the_tab_key(tab, files):
    tab.open(files / "small.html")
    wanted = tab.page.evaluate(
        "document.querySelectorAll('button:not(:disabled), input, select, [tabindex=\"0\"]').length"
    )
    seen = set()
    for _ in range(wanted):
        tab.page.keyboard.press("Tab")
        seen.add(
            tab.page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        )
    assert len(seen) == wanted


def test_the_url_restores_the_view(tab, files):
    tab.open(files / "many operators.html")
    tab.page.locator(".ipus").get_by_role("button", name="IPU 1").click()
    tab.page.get_by_label("Filter Operators", exact=True).fill("mm")
    tab.page.get_by_label("Group Operators by").select_option("module")
    tab.page.locator("#operators-rows").get_by_role("button", name="Wasted").click()
    tab.page.get_by_role("button", name="To the peak").click()
    fragment, rows = tab.page.evaluate("location.hash"), tab.rows("operators")
    status = tab.text("#step-status")
    tab.open(files / "many operators.html", fragment)
    assert (tab.rows("operators"), tab.text("#step-status")) == (rows, status)
    assert tab.page.evaluate("location.hash") == fragment
    assert tab.page.get_by_label("Filter Operators", exact=True).input_value() == "mm"


@pytest.mark.parametrize(
    "fragment",
    [
        "#ipu=99&operator=-1&step=1e9",
        "#operators.sort=toString&operators.group=x",
        "#ipu=%F0%28",
        "#%",
    ],
)
def test_a_url_with_unknown_things_opens(tab, files, fragment):
    tab.messages.clear()
    tab.open(files / "small.html", fragment)
    assert len(tab.rows("operators")) == 40
    assert tab.messages == []


def test_times_of_this_computer_are_below_the_timeline(tab, files, tmp_path):
    tab.open(files / "small.html")
    assert tab.page.locator("#measured-rows").count() == 0
    times = [(0, 1.0, 1.5), (1, 2.0, 2.25), (2, 4.0, 4.25)]
    spans = [Span(0, "stage 0 forward", 0, 2, batch, 0, *time) for batch, *time in times]
    write_report(drawn_prediction(), tmp_path / "report.html", timeline=Timeline(spans))
    tab.open(tmp_path / "report.html")
    (row,) = tab.rows("measured")
    assert row == {
        "Call": "stage 0 forward",
        "IPU": "IPU 2",
        "Stage": "0",
        "Runs": "3",
        "Median": "250 ms",
        "All runs": "1.00 s",
    }


def test_names_are_shown_as_text(tab, tmp_path):
    prediction = drawn_prediction(module=HOSTILE, line=HOSTILE, model=HOSTILE, layers=1)
    write_report(prediction, tmp_path / "report.html")
    tab.messages.clear()
    tab.open(tmp_path / "report.html")
    assert tab.messages == []
    assert tab.page.locator("img").count() == 0
    assert tab.text("h1").startswith(HOSTILE)
    assert HOSTILE in tab.rows("operators")[0]["Line"]
    assert tab.rows("operators")[0]["Module"].startswith(f"{HOSTILE}.0, ")
    assert tab.page.title() == f"{HOSTILE} on bow-pod4"


def test_a_table_copies_as_csv(tab, tmp_path):
    prediction = drawn_prediction(line='=1+"2"', rows=3)
    write_report(prediction, tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    tab.page.locator("#operators").get_by_role("button", name="Copy as CSV").click()
    head, *lines = tab.page.evaluate("window.copied").split("\r\n")[:-1]
    assert head.startswith('"Operator","Line","Cycles"')
    assert len(lines) == 6
    assert all('"\'=1+""2"":' in line for line in lines)


def test_the_page_prints_and_follows_dark(tab, files):
    tab.open(files / "small.html")
    colors = []
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        colors.append(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
    tab.page.emulate_media(media="print", color_scheme="light")
    assert not tab.page.locator("nav").is_visible()
    tab.page.emulate_media(media="screen", color_scheme="light")


def test_a_narrow_window_needs_no_scrolling_sideways(tab, files):
    tab.page.set_viewport_size({"width": 700, "height": 800})
    try:
        tab.open(files / "small.html")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        tab.page.set_viewport_size({"width": 1200, "height": 800})


@pytest.fixture(scope="module")
def posix(playwright):
    """A tab under LANG=C, with the language that some versions of Chromium have there."""
    for tab in tabs(playwright, env={**os.environ, "LANG": "C", "LANGUAGE": "", "LC_ALL": "C"}):
        tab.page.add_init_script(
            "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'});"
        )
        yield tab


def test_a_report_opens_under_lang_c(files, posix):
    posix.open(files / "small.html")
    assert posix.messages == []
    assert re.search(r"step \d+ of 120 \(the peak\)", posix.text("#step-status"))
    assert posix.page.locator("#memory-chart canvas").count() == 1
