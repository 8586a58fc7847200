"""Check what the short form of a program leaves out, and that its sums are those of its lines."""

import re

import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program import AllReduce, Copy, Load, Repeat, Store, TensorType
from ipu_dynamo.program.text.short_text import folded
from ipu_dynamo.program.traffic import exchanged


def lines(body):
    return [line for _, line in folded(body)]


def load(name, size, ipu=0, kind=Load):
    return kind(name, name, TensorType(torch.float32, (size,)), ipu, None, "here")


@given(st.integers(1, 12))
def test_long_lists_name_the_first_two_and_the_last_and_count_the_others(count):
    reduce = AllReduce(tuple(f"g{i}" for i in range(count)), 1)
    (line,) = lines([reduce])
    if count <= 6:
        assert line == str(reduce)
    else:
        last = count - 1
        assert line == (
            f"all_reduce sum over replicas (%g0, %g1, ... {count - 3} more, %g{last})  on ipu1"
        )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.sampled_from([Load, Store]))))
def test_moves_that_share_a_line_are_of_one_ipu_and_direction_and_their_bytes_are_added(moves):
    body = [load(f"v{i}", size, ipu, kind) for i, (size, ipu, kind) in enumerate(moves)]
    found = lines(body)
    assert len(found) <= len(body)
    for kind, word in ((Load, "load"), (Store, "store")):
        shown = [int(re.search(r"(\d+) bytes", x)[1]) for x in found if x.startswith(word)]
        assert sum(shown) == sum(i.type.nbytes for i in body if isinstance(i, kind))


def test_a_folded_line_keeps_the_form_of_a_single_one():
    body = [load(f"v{i}", 2, ipu=3) for i in range(8)]
    assert lines(body) == ["load %v0, %v1, ... 5 more, %v7: 64 bytes in all  off chip -> ipu3"]
    assert lines(body[:2]) == [str(one) for one in body[:2]]


def test_loops_count_in_what_ipus_exchange():
    value = TensorType(torch.float16, (3,))
    copies = (Copy("a", "b", value, 0, 1, ""), Copy("c", "d", value, 1, 0, ""))
    body = [Repeat("device_iteration", 2, (copies[0], Repeat("micro_batch", 5, copies)))]
    assert exchanged(body) == {(0, 1): 6 * 2 * 6, (1, 0): 6 * 2 * 5}
