"""Check text, report and trace of predicted programs: digits, BERT, and one that does not fit."""

from collections import Counter

import pytest
import torch

import ipu_dynamo
from benchmarks.published_models import BERT_BASE, BERT_LARGE, bert
from examples.digits import Network, pipelined
from ipu_dynamo.report.html_page import html_page
from ipu_dynamo.report.trace import MOST_EVENTS, trace
from tests.report.browser import playwrights, tabs
from tests.report.test_trace import nesting_faults, spans_of

SHARES = (0.25,) * 4
SECTIONS = ("peak", "operators", "cycles", "timeline", "machine", "made")
MOST_BYTES = {"digits": 250_000, "BERT": 10**6, "large batch": 10**6, "BERT-Large": 10**6}
NAMES = [
    name if name == "digits" else pytest.param(name, marks=pytest.mark.slow) for name in MOST_BYTES
]


def predicted(name):
    """A prediction by the name of its model."""
    if name == "digits":
        with torch.device("meta"):
            network = pipelined(Network())
            images, labels = torch.empty(8, 1, 8, 8), torch.empty(8, dtype=torch.int64)
        sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        options = {"gradient_accumulation": 8, "strategy": ipu_dynamo.Strategy(kind="pipelined")}
        return ipu_dynamo.predict(network, images, labels, optimizer=sgd, options=options)
    size, rows = {
        "BERT": (BERT_BASE, 32),
        "large batch": (BERT_BASE, 256),
        "BERT-Large": (BERT_LARGE, 8),
    }[name]
    program = bert(size, rows, SHARES).program(replicas=4, accumulation=64)
    return ipu_dynamo.predict(program, machine="bow-pod16")


@pytest.fixture(scope="module")
def prediction_of():
    """Predictions by name, each made once."""
    made = {}

    def prediction_of(name):
        if name not in made:
            made[name] = predicted(name)
        return made[name]

    return prediction_of


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_text_and_the_report_have_their_sizes(prediction_of, name):
    prediction = prediction_of(name)
    lines = str(prediction).split("\n")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert len(html_page(prediction)) <= MOST_BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_adds_up_to_the_prediction(prediction_of, name):
    prediction = prediction_of(name)
    made = trace(prediction)
    assert len(made["traceEvents"]) <= MOST_EVENTS
    tracks = spans_of(made["traceEvents"])
    assert not [fault for spans in tracks.values() for fault in nesting_faults(spans)]
    for number, ipu in enumerate(prediction.ipus):
        cycles = Counter()
        for arguments in (span["args"] for span in tracks[number]):
            if "work" in arguments:
                cycles[arguments["work"]] += arguments["cycles"] * arguments.get("count", 1)
        assert cycles["call"] + cycles["write"] == ipu.cycles.operators.total
        assert cycles["copy"] == ipu.cycles.copies
        assert cycles["host"] == ipu.cycles.host_io
        assert cycles["update"] == ipu.cycles.update
        assert cycles.total() == ipu.cycles.busy


@pytest.fixture(scope="module")
def tab():
    for playwright in playwrights():
        yield from tabs(playwright)


@pytest.mark.parametrize("name", NAMES)
def test_a_report_opens_in_a_browser(prediction_of, tab, tmp_path, name):
    file = tmp_path / "report.html"
    prediction = prediction_of(name)
    ipu_dynamo.write_report(prediction, file)
    tab.messages.clear()
    tab.open(file)
    for section in SECTIONS:
        assert tab.text(f"#{section} .body")
    assert tab.page.locator("tr").count() <= 400
    lines = {row.line for row in prediction.operators}
    assert {row["Line"] for row in tab.rows("operators")} <= lines
    tab.page.get_by_role("button", name="To the peak").click()
    assert "(the peak)" in tab.text("#step-status")
    peak = prediction.ipus[prediction.verdict.ipu].memory.peak
    assert len(tab.rows("tensors")) <= len(peak.tensors)
    for row in range(3):
        tab.page.locator("#operators-rows").focus()
        tab.page.keyboard.press("ArrowDown")
        tab.page.keyboard.press("Enter")
        assert len(tab.chosen("operators")) == 1, row
    assert tab.messages == []
    assert tab.requests == [f"file://{file}"]


@pytest.mark.slow
def test_a_large_micro_batch_does_not_fit(prediction_of):
    assert prediction_of("BERT").verdict.word != "does not fit"
    assert prediction_of("large batch").verdict.word == "does not fit"
