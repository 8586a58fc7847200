"""Claims about transports: functions that each rank of a mesh runs with its own transport."""

import threading

import torch

from ipu_dynamo.program import TensorType
from ipu_dynamo.program.replica_tree import additions
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.runtime.ranks.wires import Wires


def filled(value, size=3):
    """A message that has one value in all of its bytes."""
    return torch.full((size,), value, dtype=torch.uint8)


def messages_of_a_tag_keep_their_order(transport):
    """The first of several ranks sends; the last one receives the second tag first."""
    last = transport.share.ranks - 1
    tags = [(0, 1, 0), (0, 0, 1)]
    if transport.share.rank == 0:
        sends = [transport.send(last, tags[n % 2], filled(n)) for n in range(6)]
        for send in sends:
            send.wait()
    elif transport.share.rank == last:
        for first in (1, 0):
            for n in range(first, 6, 2):
                message = filled(255)
                transport.receive(0, tags[first], message).wait()
                assert torch.equal(message, filled(n))


def a_send_does_not_wait_for_its_receive(transport):
    """Both ends send before they receive."""
    rank, last = transport.share.rank, transport.share.ranks - 1
    if rank in (0, last):
        other, size = last - rank, 1 << 22
        send = transport.send(other, (0, 0, 0), filled(rank + 1, size))
        message = filled(255, size)
        transport.receive(other, (0, 0, 0), message).wait()
        send.wait()
        assert torch.equal(message, filled(other + 1, size))


def collectives_give_the_values_of_a_group_in_its_order(transport):
    share = transport.share
    groups = {"row": share.of_row, "column": share.of_column, "mesh": range(share.ranks)}
    for among, ranks in groups.items():
        gathered = transport.gather(among, filled(share.rank, 5))
        assert gathered.tolist() == [[rank] * 5 for rank in ranks]
        place, target = ranks.index(share.rank), filled(255, 5 * len(ranks))
        given = transport.gather(among, filled(share.rank, 5), target)
        assert given.data_ptr() == target.data_ptr()
        assert torch.equal(target, gathered.flatten())
        # the part for the rank `i` of a group has `i` bytes: none for the first
        others = [i for i in range(len(ranks)) if i != place]
        received = {i: filled(255, place) for i in others}
        sent = {i: filled(10 * share.rank + i, i) for i in others}
        transport.exchange(among, sent, received)
        for i in others:
            assert received[i].tolist() == [10 * ranks[i] + place] * place
        values = torch.tensor([share.rank, -share.rank, -(1 << 62) + share.rank])
        largest = transport.maximum(among, values).tolist()
        assert largest == [ranks[-1], -ranks[0], -(1 << 62) + ranks[-1]]
        assert values.tolist()[0] == share.rank
        message = filled(share.rank)
        transport.broadcast(among, message)
        assert torch.equal(message, filled(ranks[0]))


def a_thread_receives_during_collectives(transport):
    rank, ranks = transport.share.rank, transport.share.ranks
    messages = [filled(255) for _ in range(8)]

    def receive():
        for n, message in enumerate(messages):
            transport.receive((rank - 1) % ranks, (1, n, 0), message).wait()

    thread = threading.Thread(target=receive)
    thread.start()
    sends = []
    for n in range(len(messages)):
        transport.maximum("mesh", torch.tensor([n]))
        sends.append(transport.send((rank + 1) % ranks, (1, n, 0), filled(rank)))
    thread.join()
    for send in sends:
        send.wait()
    assert all(torch.equal(message, filled((rank - 1) % ranks)) for message in messages)


def values_of_wires_arrive_with_their_strides(transport):
    rank, ranks = transport.share.rank, transport.share.ranks
    wires = Wires(transport, 3)
    values = [torch.arange(12.0).view(3, 4).t(), torch.tensor(2), torch.ones(3).expand(2, 3)]
    for wire, value in enumerate(values):
        wires.expect((rank - 1) % ranks, wire, 1, 3, TensorType.of(value))
    for number in range(3):
        for wire, value in enumerate(values):
            wires.post((rank + 1) % ranks, wire, 1, value if number else value + 1)
    for number in range(3):
        for wire, value in enumerate(values):
            wires.wait((rank - 1) % ranks, wire, 1)
            expected = value if number else value + 1
            taken = wires.take((rank - 1) % ranks, wire, 1)
            assert torch.equal(taken, expected)
            assert taken.stride() == expected.stride()
    wires.complete()


def sums_over_replicas_have_the_bits_of_one_process(transport):
    """Three replicas a rank, so ranks hold no whole subtree; few bytes and many."""
    share, replicas = transport.share, 3 * transport.share.rows
    drawn = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    values = [
        [torch.randn(50_000, generator=drawn), torch.randn(7, generator=drawn).double()]
        for _ in range(replicas)
    ]
    own = [[value.clone() for value in values[replica]] for replica in share.replicas(replicas)]
    ReplicaSums(own, replicas, transport)()
    for total, term in additions(replicas):
        for a, b in zip(values[total], values[term], strict=True):
            a += b
    assert all(map(torch.equal, own[0], values[0]))


CHECKS = [
    messages_of_a_tag_keep_their_order,
    a_send_does_not_wait_for_its_receive,
    collectives_give_the_values_of_a_group_in_its_order,
    a_thread_receives_during_collectives,
    values_of_wires_arrive_with_their_strides,
    sums_over_replicas_have_the_bits_of_one_process,
]
