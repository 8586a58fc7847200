"""Check the choice of points of clouds against plain loops."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ipu_dynamo
from ipu_dynamo import Options
from ipu_dynamo.ops.library.points import farthest_points, nearest_points


def plain_farthest(cloud, count, start=0):
    chosen = [start][:count]
    while len(chosen) < count:
        distances = [min(((p - cloud[c]) ** 2).sum().item() for c in chosen) for p in cloud]
        chosen.append(distances.index(max(distances)))
    return chosen


@given(st.integers(0, 99), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.floats(0, 1))
def test_each_next_point_is_the_farthest(seed, sizes, ratio):
    torch.manual_seed(seed)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    points = torch.randint(5, (ends[-1], 3)).double()  # many distances are equal
    found = farthest_points(points, ends, ratio).tolist()
    expected = []
    for first, end in pairwise(ends):
        count = -int(-(ratio * (end - first)) // 1)
        expected += [first + i for i in plain_farthest(points[first:end], count)]
    assert found == expected


def test_a_random_start_is_in_its_cloud_and_drawn_anew():
    points = torch.randn(20, 2)
    compiled = ipu_dynamo.compile_inference(
        lambda x: farthest_points(x, [0, 10, 20], 0.2, random_start=True),
        Options(engine="eager", seed=1),
    )
    starts = set()
    for _ in range(8):
        chosen = compiled(points).tolist()
        starts.add(chosen[0])
        for cloud, first in ((chosen[:2], 0), (chosen[2:], 10)):
            local = [i - first for i in cloud]
            assert local == plain_farthest(points[first : first + 10], 2, local[0])
    assert len(starts) > 1


@given(st.integers(0, 99), st.booleans(), st.booleans())
def test_the_nearest_point_of_the_same_cloud_is_found(seed, of_x, of_y):
    torch.manual_seed(seed)
    x, y = torch.randn(7, 2), torch.randn(9, 2)
    clouds_x = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    clouds_y = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    found = nearest_points(x, y, clouds_x if of_x else None, clouds_y if of_y else None).tolist()
    for row, index in enumerate(found):
        cloud = clouds_x[row] if of_x else 0
        among = [i for i in range(9) if (clouds_y[i] if of_y else 0) == cloud]
        wanted = min(among, key=lambda i: (x[row] - y[i]).norm().item()) if among else 0
        assert index == wanted


@pytest.mark.parametrize(
    ("ends", "ratio", "problem"),
    [([0, 5], 0.5, "not in 4 rows"), ([3, 1], 0.5, "not in"), ([0, 4], 1.5, "from 0 to 1")],
)
def test_what_does_not_go_together_is_refused(ends, ratio, problem):
    with pytest.raises(ValueError, match=problem):
        farthest_points(torch.zeros(4, 2), ends, ratio)
