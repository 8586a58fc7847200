"""Check that the drawing of a program has its instructions, each where it takes place."""

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from ipu_dynamo import draw_program
from ipu_dynamo.program import Call, Copy, Repeat
from tests.inspection.looking import pipeline

SVG = {"svg": "http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def step():
    step = pipeline(engine="eager")
    step.compile(torch.ones(12, 8))
    return step


@pytest.fixture(scope="module")
def drawing(step):
    return ElementTree.fromstring(draw_program(step))


def lanes(drawing):
    """The middle of each lane by its name."""
    bold = [text for text in drawing.findall("svg:text", SVG) if text.get("font-weight")]
    return {text.text: float(text.get("x")) for text in bold}


def test_every_instruction_is_drawn_in_order(step, drawing):
    titles = [
        group.findtext("svg:title", namespaces=SVG) for group in drawing.findall("svg:g", SVG)
    ]
    plain = [i for i in step.program.walk() if not isinstance(i, Repeat)]
    assert list(dict.fromkeys(titles)) == list(dict.fromkeys(map(str, plain)))
    loops = [str(i) for i in step.program.walk() if isinstance(i, Repeat)]
    texts = [text.text for text in drawing.findall("svg:text", SVG)]
    assert loops
    assert [text for text in texts if text.startswith("repeat")] == loops


def test_calls_are_in_the_lane_of_their_ipu_and_copies_between_two(step, drawing):
    middles, rows = lanes(drawing), {}
    assert list(middles) == ["host", "ipu0", "ipu1", "ipu2"]
    for group in drawing.findall("svg:g", SVG):
        rects = group.findall("svg:rect", SVG)
        left = min(float(rect.get("x")) for rect in rects[:1])
        right = max(float(rect.get("x")) + float(rect.get("width")) for rect in rects)
        rows[group.findtext("svg:title", namespaces=SVG)] = left, right, group
    for instruction in step.program.walk():
        if isinstance(instruction, Call):
            left, right, _ = rows[str(instruction)]
            assert (left + right) / 2 == pytest.approx(middles[f"ipu{instruction.ipu}"])
        if isinstance(instruction, Copy):
            *_, group = rows[str(instruction)]
            line = group.find("svg:rect", SVG)
            ends = float(line.get("x")), float(line.get("x")) + float(line.get("width"))
            both = middles[f"ipu{instruction.src}"], middles[f"ipu{instruction.dst}"]
            assert ends == pytest.approx(tuple(sorted(both)))
            tip = float(group.find("svg:path", SVG).get("d").split()[0].removeprefix("M"))
            assert tip == pytest.approx(middles[f"ipu{instruction.dst}"])


def test_only_programs_are_drawn():
    with pytest.raises(TypeError, match="draw_program cannot draw a Linear; give the step of"):
        draw_program(nn.Linear(1, 1))


def test_a_picture_for_a_dark_page_has_other_grounds_and_the_same_boxes(step):
    light, dark = draw_program(step), draw_program(step).dark()

    def fills(picture, within):
        return [rect.get("fill") for rect in ElementTree.fromstring(picture).findall(within, SVG)]

    assert fills(light, "svg:rect")[0] == "#ffffff"
    assert fills(dark, "svg:rect")[0] != "#ffffff"
    calls = [i for i, title in enumerate(light.split("<g>")) if " = call @" in title]
    assert calls
    for number in calls:
        assert light.split("<g>")[number] == dark.split("<g>")[number]
    assert len(light) == len(dark)
