"""Check that drawings of schedules have the right boxes, widths, colours and words."""

from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import draw_schedules
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.program.schedule.planning import pipelined, sequential, side_by_side
from tests.program.schedule.test_schedule import FORWARD, call, training_calls

SVG = {"svg": "http://www.w3.org/2000/svg"}


def boxes_of(picture):
    """For each box its title, its number, and its rectangles as (x, y, width, fill)."""
    boxes = []
    for group in ElementTree.fromstring(picture).findall("svg:g", SVG):
        parts = [
            (*(float(rect.get(key)) for key in ("x", "y", "width")), rect.get("fill"))
            for rect in group.findall("svg:rect", SVG)
        ]
        title, number = (group.findtext(f"svg:{tag}", namespaces=SVG) for tag in ("title", "text"))
        boxes.append((title, number, parts))
    return boxes


def texts_of(picture):
    return [text.text for text in ElementTree.fromstring(picture).findall("svg:text", SVG)]


@given(
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    replicas=st.integers(1, 2),
    workers=st.integers(1, 5),
    cycles=st.booleans(),
)
def test_draws_a_box_for_every_task(stages, micro_batches, replicas, workers, cycles):
    calls = training_calls(stages)
    schedule = pipelined(calls, micro_batches=micro_batches, replicas=replicas, workers=workers)
    picture = schedule.svg(cycles=cycles)
    boxes = boxes_of(picture)
    assert len({title for title, *_ in boxes}) == len(calls) * micro_batches * replicas
    numbers = sorted(int(number) for _, number, _ in boxes)
    assert numbers == sorted(t.micro_batch for of in schedule.runs for t in of)
    places = sorted((y, x, width) for *_, parts in boxes for x, y, width, _ in parts[-1:])
    for (row, x, width), (below, right, _) in pairwise(places):
        assert row < below or x + width <= right + 0.02  # none lies on another
    texts = texts_of(picture)
    assert [text for text in texts if text in schedule.rows] == list(schedule.rows)
    for stage, kept in schedule.stash().items():
        assert any(f"stage {stage} " in text and text.endswith(f" {kept}") for text in texts)
    elements = ElementTree.fromstring(picture).iter()
    assert not [one for one in elements if "href" in str(one.attrib)]  # it stands alone


def test_a_box_is_as_wide_as_its_time():
    """A pass of both directions takes three cycles: one is forward, two are backward."""
    boxes = boxes_of(pipelined(training_calls(2), micro_batches=3).svg())
    widths = {title.split()[0]: [part[2] for part in parts] for title, _, parts in boxes}
    (cycle, _), step, (backward, _) = (widths[f"@{n}"] for n in ("forward0", "step1", "backward0"))
    assert backward == 2 * cycle
    assert step == [cycle, 2 * cycle, 3 * cycle]


def test_a_repeated_forward_pass_is_drawn():
    schedule = pipelined(training_calls(2), micro_batches=3)
    passes = (*schedule.passes[:-1], replace(schedule.passes[-1], repeats=True))
    boxes = boxes_of(replace(schedule, passes=passes).svg())
    widths = {title.split()[0]: [part[2] for part in parts] for title, _, parts in boxes}
    cycle = widths["@forward0"][0]
    assert widths["@backward0"] == [cycle, 2 * cycle, 3 * cycle]


def test_several_schedules_have_one_axis():
    calls = training_calls(4)
    split = [
        one
        for of in calls
        for one in (of, replace(of, function=f"weights{of.stage}", direction="weights"))
        if one is of or of.direction != "forward"
    ]
    schedules = {
        "grouped": pipelined(calls, micro_batches=8),
        "zero <bubble>": pipelined(split, micro_batches=8),
    }
    picture = draw_schedules(schedules)
    forward = {parts[0][2] for title, _, parts in boxes_of(picture) if title.startswith("@forward")}
    assert len(forward) == 1
    ends = {}
    for title, schedule in schedules.items():
        cycles = counted(schedule.timed().cycles, "cycle")
        idle = f"{title}: {schedule.idle:.1%} idle, {cycles} of time"
        assert idle in texts_of(picture)
        last = max(x + width for *_, parts in boxes_of(schedule.svg()) for x, _, width, _ in parts)
        ends[title] = last
    assert texts_of(picture).count("ipu3") == 2
    assert ends["zero <bubble>"] < ends["grouped"]


def test_sixteen_stages_have_distinct_colours():
    boxes = boxes_of(pipelined(training_calls(17), micro_batches=1).svg())
    colours = {}
    for title, _, parts in boxes:
        function, stage = title.split()[0], title.split("stage ")[1].split(",")[0]
        kind = function.strip("@0123456789")
        colours.setdefault(kind, {})[stage] = bytes.fromhex(parts[0][3].strip("#"))
    assert [len(of) for of in colours.values()] == [16, 16, 1]
    for of in (colours["forward"], colours["backward"]):
        for one, other in combinations(of.values(), 2):
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 16


def test_long_times_do_not_make_long_pictures():
    schedule = pipelined(training_calls(2), micro_batches=3).timed([1_000, 3_000_000, 2_000_000])
    picture = schedule.svg(cycles=True)
    assert float(ElementTree.fromstring(picture).get("width")) < 8000
    assert len(boxes_of(picture)) == 9


def test_only_schedules_are_drawn():
    with pytest.raises(ValueError, match="takes schedules by title, and was given none"):
        draw_schedules({})
    with pytest.raises(TypeError, match="cannot draw 'mine', a Linear; give the step of"):
        draw_schedules({"mine": nn.Linear(1, 1)})
    with pytest.raises(TypeError, match=r"by title, as \{.mine.: step\}, and not a Linear"):
        draw_schedules(nn.Linear(1, 1))


def test_notebooks_show_a_drawing():
    picture = draw_schedules({"inference": pipelined(FORWARD, micro_batches=3)})
    assert picture._repr_svg_() == picture
    assert not any("keeps 1" in text for text in texts_of(picture))


def test_a_drawing_says_what_a_pass_waits_for_and_where_gradients_are_added():
    def titles(schedule):
        return [title for title, *_ in boxes_of(schedule.svg())]

    first, ahead, *_, last = titles(pipelined(FORWARD, micro_batches=3))
    assert "waits" not in first + ahead
    assert "; waits for %h of 0F2: model.py:1" in last
    one = call("step0", 0, 0, "forward_backward")
    shared = titles(side_by_side(one, ["w.grad"], micro_batches=2, workers=2))
    assert "cycle 0; then adds its gradients: model.py:1" in shared[0]
    assert "cycle 0; waits for %w.grad of 0FB0; then adds its gradients: model.py:1" in shared[1]


def test_a_drawing_escapes_what_users_wrote():
    nasty = replace(FORWARD[0], function="f<0>&", source='m.py:1 in f: a < b and "<script>"')
    text = sequential([nasty], micro_batches=1).svg()
    assert "<script>" not in text
    assert "@f<0>&" in "".join(ElementTree.fromstring(text).itertext())
