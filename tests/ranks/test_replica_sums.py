"""Check that sums over replicas have the bits of one process, however ranks share replicas."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ipu_dynamo.program.replica_tree import additions
from ipu_dynamo.runtime.ranks import replica_sums
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.testing.rank_threads import run_ranks

SHAPES = [(torch.float32, (3, 5)), (torch.int64, (2,)), (torch.float32, ()), (torch.float16, (7,))]
EMPTY = [(torch.float32, (0, 4))]
SHAPES += [*EMPTY, (torch.bfloat16, (2, 3, 1))]


def values_of(replicas, seed, shapes=SHAPES):
    """Values of each replica, of sizes so different that each order of sums has other bits."""
    generator = torch.Generator().manual_seed(seed)

    def value(dtype, shape):
        sizes = torch.randint(-3, 4, shape, generator=generator).double()
        numbers = torch.randn(shape, generator=generator).double() * 10**sizes
        return numbers.to(dtype).t() if len(shape) == 2 else numbers.to(dtype)

    return [[value(*kind) for kind in shapes] for _ in range(replicas)]


def sums_of_one_process(values):
    values = [[tensor.clone() for tensor in tensors] for tensors in values]
    for total, term in additions(len(values)):
        for a, b in zip(values[total], values[term], strict=True):
            a += b
    return values[0]


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 2),
    each=st.integers(1, 5),
    gathered=st.sampled_from([0, 24, 1 << 16]),
    shapes=st.just(SHAPES) | st.lists(st.sampled_from(SHAPES), max_size=3),
    seed=st.integers(0, 99),
)
@example(rows=2, columns=1, each=3, gathered=0, shapes=SHAPES, seed=0)  # 3 + 3: two partial sums
@example(rows=2, columns=1, each=5, gathered=0, shapes=SHAPES, seed=0)  # two of them and three
@example(rows=2, columns=1, each=5, gathered=1 << 16, shapes=SHAPES, seed=0)
@example(rows=3, columns=2, each=1, gathered=24, shapes=SHAPES, seed=0)  # bytes: floats are above
@example(rows=2, columns=1, each=2, gathered=1 << 16, shapes=EMPTY, seed=0)
def test_sums_over_ranks_have_the_bits_of_one_process(rows, columns, each, gathered, shapes, seed):
    replicas = rows * each
    values = [values_of(replicas, seed + column, shapes) for column in range(columns)]

    def run(transport):
        share = transport.share
        own = [
            [tensor.clone() for tensor in values[share.column][replica]]
            for replica in share.replicas(replicas)
        ]
        sums = ReplicaSums(own, replicas, transport)
        results = []
        for _ in range(2):  # buffers are used again
            for tensors, replica in zip(own, share.replicas(replicas), strict=True):
                for a, b in zip(tensors, values[share.column][replica], strict=True):
                    a.copy_(b)
            sums()
            results.append([tensor.clone() for tensor in own[0]])
        return results

    with mock.patch.object(replica_sums, "GATHERED_BYTES", gathered):
        found = run_ranks(rows, columns, run)
    for rank, results in enumerate(found):
        expected = sums_of_one_process(values[rank % columns])
        for got in results:
            assert all(map(torch.equal, got, expected))


def test_the_drawn_values_have_another_sum_in_another_order():
    """Without that the property above would not depend on the order."""
    values = values_of(6, 0)
    in_order = [sum(terms[1:], terms[0]) for terms in zip(*values, strict=True)]
    equal = [*map(torch.equal, in_order, sums_of_one_process(values))]
    assert not any(
        equal[place] for place, kind in enumerate(SHAPES) if len(kind[1]) and kind[1][0] > 2
    )


def test_replicas_of_one_process_are_summed_without_a_transport():
    values = values_of(6, 1)
    expected = sums_of_one_process(values)
    ReplicaSums(values, 6)()
    assert all(map(torch.equal, values[0], expected))


def test_a_rank_that_skips_its_own_sums_still_takes_part():
    """As one does that failed before: the others do not wait for it."""
    values = values_of(4, 2)

    def run(transport):
        sums = ReplicaSums([values[r] for r in transport.share.replicas(4)], 4, transport)
        if transport.share.rank:
            sums.add_own()
        sums.exchange()

    run_ranks(2, 1, run)


@pytest.mark.parametrize("nbytes", [4, 1 << 20])
def test_few_bytes_are_gathered_and_many_are_dealt(nbytes):
    def run(transport):
        calls = []
        gather, exchange = transport.gather, transport.exchange
        transport.gather = lambda *of: (calls.append("gather"), gather(*of))[1]
        transport.exchange = lambda *of: (calls.append("exchange"), exchange(*of))[1]
        ReplicaSums([[torch.ones(nbytes // 4), torch.ones(1, dtype=torch.int32)]], 2, transport)()
        return calls

    calls = run_ranks(2, 1, run)[0]
    assert calls == (["gather"] if nbytes == 4 else ["exchange", "gather", "gather"])
