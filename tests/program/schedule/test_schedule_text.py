"""Check that the text of a schedule is read back, and that mistakes in it are shown by line."""

import pytest

from ipu_dynamo.program.schedule.planning import pipelined, side_by_side
from ipu_dynamo.program.schedule.schedule import Schedule
from tests.program.schedule.test_schedule import call, training_calls

TEXT = """schedule of 3 passes on 2 workers
  0F: @forward0 on ipu0  # model.py:1
  1FB: @step1 on ipu1  # model.py:1
  0B: @backward0 on ipu0  # model.py:1
  0F>1FB: %h1
  1FB>0B: %d1
  worker 0: 0F0 0F0>1FB | 0F1 0F1>1FB | 0B<1FB0 0B0 | 0B<1FB1 0B1
  worker 1:  | 1FB<0F0 1FB0 1FB0>0B | 1FB<0F1 1FB1 1FB1>0B"""


def test_shows_passes_transfers_and_workers():
    schedule = pipelined(training_calls(2), micro_batches=2)
    assert str(schedule) == TEXT
    assert Schedule.parse(TEXT) == schedule


def test_names_of_any_kind_are_read_back():
    """One pass of a stage may be followed by another of the same kind."""
    odd = ["a b", 'c", %d', "e.f", "g\\", "ü\n"]
    calls = [
        call("f on ipu1  # x", 0, 0, "forward", makes=odd),
        call("<g>", 1, 1, "forward", reads=odd, makes=["y"]),
        call("h", 0, 0, "forward", reads=["y"]),
    ]
    schedule = pipelined(calls, micro_batches=2)
    assert schedule.names == ("0F", "1F", "0Fb")
    assert schedule.transfers[0].values == tuple(odd)
    assert Schedule.parse(str(schedule)) == schedule


def test_sums_are_handed_from_worker_to_worker():
    one = call("step0", 0, 0, "forward_backward")
    schedule = side_by_side(one, ["w.grad", "b.grad", "w.grad"], micro_batches=3, workers=2)
    assert str(schedule).splitlines()[2:] == [
        "  0FB>0FB: %w.grad, %b.grad",
        "  worker 0: 0FB0 add0 0FB0>0FB | 0FB2 0FB<0FB1 add2",
        "  worker 1: 0FB1 0FB<0FB0 add1 0FB1>0FB",
    ]
    alone = side_by_side(one, ["w.grad"], micro_batches=2, workers=1)
    assert str(alone).splitlines()[2:] == ["  worker 0: 0FB0 add0 | 0FB1 add1"]


def test_blank_lines_around_a_text_do_not_matter():
    assert str(Schedule.parse(f"\n{TEXT}\n\n")) == TEXT
    with pytest.raises(ValueError, match="line 1: expected 'schedule of"):
        Schedule.parse("")


def test_cycles_may_be_left_out():
    plain = Schedule.parse(TEXT.replace(" |", ""))
    schedule = Schedule.parse(TEXT)
    assert plain.timed() == schedule.timed()
    assert plain.cycles == 1


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("3 passes", "2 passes", 1, "expected 'schedule of 3 passes on 2 workers'"),
        ("0F: @forward0", "0X: @forward0", 2, "expected 'PASS: @FUNCTION on ipuNUMBER"),
        ("1FB: @step1", "0F: @step1", 3, "expected each pass once"),
        ("0F>1FB: %h1", "0F>2FB: %h1", 5, "expected one of the passes 0F, 1FB, 0B, not 2FB"),
        ("0F>1FB: %h1", "0F>1FB: h1", 5, "expected names as %h"),
        ("0F>1FB: %h1", "0F>1FB: %h1,%h2", 5, "expected names as %h"),
        ("1FB>0B: %d1", "0F>1FB: %d1", 6, "expected each transfer once"),
        ("1FB>0B: %d1", "1FB>0B: %d1\n  2F: @f on ipu0  # x", 7, "expected 'SOURCE>TARGET"),
        ("worker 1:", "worker 2:", 8, "expected worker 1"),
        ("worker 1:", "1FB>0B:", 8, "expected 'worker NUMBER"),
        (" 0F0 ", " 0F ", 7, "expected an action as 0F1.*not 0F"),
        (" 0F0 ", " 0W0 ", 7, "expected one of the passes 0F, 1FB, 0B, not 0W"),
        ("0F0>1FB", "0F0>0B", 7, "expected one of the transfers above, not 0F>0B"),
        (" 0F0 ", " - 0F0 ", 7, "expected a pass before '-'"),
        ("  worker 0", "    worker 0", 7, "expected one schedule"),
        ("\n  worker 1", "\nworker 1", 8, "expected one schedule, with all lines but the first two"),
        ("\n  worker 1", "\n   worker 1", 8, "the indentation is not that of a line here"),
        ('0F>1FB: %h1', r'0F>1FB: %"\q"', 5, "expected a string of JSON in quotes"),
    ],
)
def test_a_mistake_is_shown_with_its_line(old, new, line, expected):
    assert old in TEXT
    with pytest.raises(ValueError, match=expected) as error:
        Schedule.parse(TEXT.replace(old, new, 1))
    assert str(error.value).startswith(f"line {line}: ")
