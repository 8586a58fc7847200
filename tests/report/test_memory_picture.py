"""Check that bars of memory are as long as the bytes that they show."""

from xml.etree import ElementTree

import pytest

from ipu_dynamo import draw_memory
from ipu_dynamo.report.views.memory_view import ipu_bars
from tests.report.predictions import drawn_prediction

SVG = {"svg": "http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("used", [0.7, 1.4])
def test_a_bar_has_the_bytes_of_each_category(used):
    prediction = drawn_prediction(ipus=3, used=used)
    root = ElementTree.fromstring(draw_memory(prediction))
    shown = {}
    for group in root.findall("svg:g", SVG):
        ipu, category = group.findtext("svg:title", namespaces=SVG).split(", ", 1)
        rect = group.find("svg:rect", SVG)
        shown[ipu, category.split(":")[0]] = float(rect.get("width"))
    scale = None
    for bar, ipu in zip(ipu_bars(prediction), prediction.ipus, strict=True):
        for category in ipu.memory.categories:
            width = shown.pop((bar["name"], category.name))
            if category.nbytes.central:
                scale = scale or width / category.nbytes.central
                assert width == pytest.approx(scale * category.nbytes.central, rel=1e-3)
            else:
                assert width == 0
    assert not shown
    texts = [text.text for text in root.findall("svg:text", SVG)]
    fits = "fits" if used < 1 else "does not fit"
    assert texts[:2][0] == "IPU 0"
    assert texts[1].endswith(fits)


def test_of_many_ipus_those_of_the_first_screen_are_drawn():
    prediction = drawn_prediction(ipus=40, rows=3, layers=1)
    root = ElementTree.fromstring(draw_memory(prediction))
    names = [text.text for text in root.findall("svg:text", SVG) if text.text.startswith("IPU ")]
    assert names == [bar["name"] for bar in ipu_bars(prediction) if bar["first"]]
    assert 1 < len(names) < 40
