"""Check that data sets arrive in another process as they were."""

import multiprocessing.context
import os
import pickle
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo.batches.pickling import DatasetTransfer, insert_tensors, strip_tensors


class Fd:
    """A descriptor that a child has inherited."""

    def __init__(self, fd):
        self.fd = os.dup(fd)

    def detach(self):
        return self.fd


@contextmanager
def starting_a_process():
    class Popen:
        DupFd = Fd

        @staticmethod
        def duplicate_for_child(fd):
            return fd

    multiprocessing.context.set_spawning_popen(Popen)
    try:
        yield
    finally:
        multiprocessing.context.set_spawning_popen(None)


def arrived(data, *, by_disk=False):
    transfer = DatasetTransfer(data, by_disk=by_disk)
    with starting_a_process():
        text = pickle.dumps(transfer)
    return pickle.loads(text).unpack()


@given(
    size=st.sampled_from([0, 1, 100, 20_000, 200_000]),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.bool, torch.complex64]),
    by_disk=st.booleans(),
)
def test_tensors_arrive_and_can_be_changed(size, dtype, by_disk):
    tensor = torch.arange(size).remainder(2).to(dtype)
    other, same = arrived([tensor, tensor], by_disk=by_disk)
    assert other is same
    assert torch.equal(other, tensor)
    other.fill_(1)
    assert torch.equal(tensor, torch.arange(size).remainder(2).to(dtype))


@pytest.mark.parametrize("size", [10, 100_000])
def test_views_still_share_memory(size):
    whole = torch.arange(float(size))
    whole, part, turned = arrived((whole, whole[2:4], whole.view(2, -1).t()))
    whole[2] = -1
    assert part.tolist() == [-1, 3]
    assert turned.shape == (size // 2, 2)
    assert turned.stride() == (1, size // 2)


def test_other_tensors_arrive():
    named = nn.Parameter(torch.ones(2))
    tagged = torch.ones(3)
    tagged.tag = "x"
    complex_ = torch.tensor([1 + 2j]).conj()
    sparse = torch.eye(3).to_sparse()
    grad = torch.ones(2, requires_grad=True)
    others = arrived(
        [
            named,
            tagged,
            complex_,
            sparse,
            grad,
        ]
    )
    assert isinstance(others[0], nn.Parameter)
    assert others[1].tag == "x"
    assert others[2].tolist() == [1 - 2j]
    assert torch.equal(others[3].to_dense(), torch.eye(3))
    assert others[4].requires_grad


def test_more_tensors_than_a_process_has_descriptors_arrive():
    others = arrived([torch.full((3,), value) for value in range(2000)])
    assert [other[0].item() for other in others] == list(range(2000))


def test_generators_and_locks_arrive():
    generator = torch.Generator().manual_seed(7)
    lock = multiprocessing.get_context("spawn").Lock()
    other, other_lock = arrived([generator, lock])
    assert (
        torch.randint(9, (5,), generator=other).tolist()
        == torch.randint(9, (5,), generator=generator).tolist()
    )
    with lock:
        assert not other_lock.acquire(block=False)


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc") else []
    arrived([torch.ones(3)])
    after = os.listdir("/proc/self/fd") if os.path.exists("/proc") else []
    assert len(after) == len(before)


# what surrounds the tensors of an item


class Graph:
    def __init__(self, nodes, name):
        self.nodes, self.name = nodes, name
        self.inner = torch.tensor([5.0])


@pytest.mark.parametrize(
    "item",
    [
        torch.ones(2),
        [torch.ones(2), (torch.zeros(1),)],
        OrderedDict(b=torch.ones(2), a=torch.zeros(1)),
        Graph(torch.ones(2), "g"),
    ],
    ids=type,
)
def test_an_item_gets_the_tensors_of_a_slot(item):
    named = item.nodes if isinstance(item, Graph) else None
    tensors = [named] if named is not None else list(leaves(item))
    slots = [torch.full_like(tensor, 7) for tensor in tensors]
    other = insert_tensors(strip_tensors(item, tensors), slots)
    assert type(other) is type(item)
    if named is not None:
        assert other.nodes is slots[0]
        assert (other.name, other.inner.tolist()) == ("g", [5.0])
    else:
        assert all(a is b for a, b in zip(leaves(other), slots, strict=True))
        if isinstance(item, dict):
            assert list(other) == list(item)


def leaves(item):
    if isinstance(item, torch.Tensor):
        yield item
    else:
        for part in item.values() if isinstance(item, dict) else item:
            yield from leaves(part)
