"""Check the numbers of phases against the table and the examples of PopTorch's guide."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import StageSpec, Strategy
from ipu_dynamo.program.schedule.phases import PhaseNumbers

LIVENESS = [
    "always_live",
    "off_chip_after_fwd",
    "off_chip_after_fwd_no_overlap",
    "off_chip_after_each_phase",
]


@pytest.mark.parametrize(
    ("liveness", "separate", "total", "forward", "backward"),
    [
        ("always_live", False, 3, [0, 1, 2], [2, 3, 4]),
        ("always_live", True, 4, [0, 1, 2], [4, 5, 6]),
        ("off_chip_after_fwd", False, 6, [0, 1, 2], [6, 7, 8]),
        ("off_chip_after_fwd_no_overlap", False, 8, [0, 2, 4], [8, 10, 12]),
        ("off_chip_after_each_phase", False, 12, [0, 4, 8], [12, 16, 20]),
        ("off_chip_after_each_phase", True, 12, [0, 4, 8], [12, 16, 20]),
    ],
)
def test_three_phases_are_numbered_as_in_the_guide(liveness, separate, total, forward, backward):
    numbers = PhaseNumbers(3, liveness, separate)
    assert numbers.total == total
    assert [numbers.forward(i) for i in range(3)] == forward
    assert [numbers.backward(i) for i in (2, 1, 0)] == backward


@given(count=st.integers(1, 20), liveness=st.sampled_from(LIVENESS), separate=st.booleans())
def test_numbers_grow_and_leave_room_for_transfers(count, liveness, separate):
    numbers = PhaseNumbers(count, liveness, separate)
    order = [numbers.forward(i) for i in range(count)]
    order += [numbers.backward(i) for i in reversed(range(count))]
    gaps = [b - a for a, b in pairwise(order)]
    turn = gaps.pop(count - 1)
    assert all(gap == numbers.stride for gap in gaps)
    assert (turn == 0) == numbers.joined
    assert turn % 2 == 0  # so that a phase and its backward phase have one parity
    if liveness != "always_live":
        assert turn >= 2  # room to store what the forward pass leaves, and to load it


def test_numbers_come_from_the_strategy():
    phases = tuple((StageSpec((name,), 0),) for name in "abc")
    strategy = Strategy("serial_phased", phases=phases, separate_backward_phase=True)
    assert PhaseNumbers.of(strategy) == PhaseNumbers(3, "always_live", True)
