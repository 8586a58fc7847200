"""Check cuts of a row against all cuts there are."""

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.passes.traced.stages.even_cut import CutProblem, cut

seconds = st.floats(0.0, 10.0).map(lambda x: round(x, 2))


def sizes_of(cuts, count):
    return [stop - start for start, stop in pairwise((0, *cuts, count))]


def slowest(row, cuts):
    edges = (0, *cuts, len(row.seconds))
    taken = row.taken or [0.0] * (len(edges) - 1)
    return max(
        sum(row.seconds[a:b]) + more for (a, b), more in zip(pairwise(edges), taken, strict=True)
    )


@given(st.data())
def test_no_other_cut_is_more_than_a_percent_faster(data):
    count, parts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    row = CutProblem(
        data.draw(st.lists(seconds, min_size=count, max_size=count)),
        taken=data.draw(st.lists(seconds, min_size=parts, max_size=parts)),
        sizes=data.draw(st.lists(st.none() | st.integers(0, 3), min_size=parts, max_size=parts)),
        allowed=data.draw(st.sets(st.integers(1, max(1, count - 1)))) if count > 1 else None,
        may_be_empty=True,
    )
    allowed = {0, count, *(range(1, count) if row.allowed is None else row.allowed)}
    every = [
        cuts
        for cuts in combinations_with_replacement(sorted(allowed), parts - 1)
        if all(
            size in (None, own) for size, own in zip(row.sizes, sizes_of(cuts, count), strict=True)
        )
    ]
    best = cut(row, parts)
    if not every:
        assert best is None
        return
    assert best in every
    assert slowest(row, best) <= 1.011 * min(slowest(row, other) for other in every) + 1e-9


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [
        (11, 4, [2, 3, 3, 3]),
        (12, 4, [3, 3, 3, 3]),
        (48, 7, [6, 7, 7, 7, 7, 7, 7]),
        (2, 3, [0, 1, 1]),
    ],
)
def test_equal_things_make_even_parts_and_larger_ones_later(count, parts, sizes):
    row = CutProblem([0.1] * count, may_be_empty=True)
    assert sizes_of(cut(row, parts), count) == sizes


def test_what_a_part_takes_besides_is_less_for_its_things():
    assert sizes_of(cut(CutProblem([1.0] * 6, taken=[2.0, 0.0]), 2), 6) == [2, 4]


def test_of_equally_fast_cuts_the_one_that_sends_least():
    assert cut(CutProblem([1.0, 0.0, 0.0, 1.0], crossing=[0, 8, 2, 8, 0]), 2) == (2,)
