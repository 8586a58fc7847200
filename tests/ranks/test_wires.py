"""Check that values reach other ranks unchanged, and that ranks that are gone end waits."""

import threading
import time

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ipu_dynamo import Options, Strategy, compile_inference
from ipu_dynamo.errors import RankLost
from ipu_dynamo.program import TensorType
from ipu_dynamo.runtime.ranks.wires import Wires
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks, transport_here
from ipu_dynamo.whole_step import ranks
from tests.ranks.mesh import Pipeline

MAKING = threading.Lock()  # torch's generator is one for all threads
NUMBER = TensorType(torch.float32, ())


def number(value):
    return torch.tensor(float(value))


@st.composite
def values(draw):
    """Tensors of all kinds of strides, at all places in a block of 64 bytes."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    memory = torch.arange(5000).remainder(2 if dtype == torch.bool else 99).to(dtype)
    start = draw(st.integers(0, 40))
    kind = draw(st.sampled_from(["contiguous", "permuted", "any", "overlapping"]))
    if kind in ("contiguous", "permuted"):
        order = draw(st.permutations(range(len(shape)))) if kind == "permuted" else [*range(4)]
        stride, step = [0] * len(shape), 1
        for dim in reversed(order[: len(shape)]):
            stride[dim] = step
            step *= max(shape[dim], 1)
    else:
        steps = st.sampled_from([0, 1, 2, 3] if kind == "overlapping" else [0, 1, 5, 25, 125])
        stride = [draw(steps) for _ in shape]
    return memory.as_strided(shape, stride, start)


def sent_alone(value):
    """Send a value from a rank to itself; returns the value that arrives."""

    def run(transport):
        wires = Wires(transport, 0)
        wires.expect(0, 0, 0, 1, TensorType.of(value))
        wires.post(0, 0, 0, value)
        wires.wait(0, 0, 0)
        taken = wires.take(0, 0, 0)
        wires.complete()
        return taken

    return run_ranks(1, 1, run)[0]


@given(values())
@example(torch.arange(6.0).view(2, 3).t())
@example(torch.ones(3).expand(2, 3))
@example(torch.arange(8.0).unfold(0, 3, 1))
@example(torch.arange(24.0)[1:].view(23, 1).as_strided((5, 1), (2, 77)))
def test_a_value_keeps_elements_strides_and_its_place_in_a_block(value):
    taken = sent_alone(value)
    assert torch.equal(taken, value)
    assert (taken.dtype, taken.stride()) == (value.dtype, value.stride())
    if value.numel():
        assert taken.data_ptr() % 64 == value.data_ptr() % 64
        assert taken.data_ptr() != value.data_ptr()


def test_a_value_may_be_written_once_it_is_posted():
    def run(transport):
        wires, value = Wires(transport, 0), torch.ones(4)
        wires.post(0, 0, 0, value)
        value.zero_()
        wires.expect(0, 0, 0, 1, TensorType.of(value))
        wires.complete()
        return wires

    (wires,) = run_ranks(1, 1, run)
    assert wires.error is None


def test_messages_of_several_wires_come_in_the_order_of_each():
    """Wires, replicas and programs have messages of their own; some are empty."""

    def run(transport):
        other = 1 - transport.share.rank
        programs = [Wires(transport, 0), Wires(transport, 1)]
        got = []
        for step in range(3):
            for wires in programs:
                for replica in range(2):
                    wires.expect(other, 0, replica, 4, NUMBER)
                wires.expect(other, 5, 0, 1, None)
            for n in range(4):
                for place, wires in enumerate(programs):
                    for replica in range(2):
                        wires.post(
                            other, 0, replica, number(100 * step + 20 * place + 10 * replica + n)
                        )
            for wires in programs:
                wires.post(other, 5, 0, None)
                for replica in (1, 0):
                    for _ in range(4):
                        wires.wait(other, 0, replica)
                        got.append(int(wires.take(other, 0, replica)))
                wires.wait(other, 5, 0)
                assert wires.take(other, 5, 0) is None
                assert wires.arrived(other, 0, 0) == 4
                wires.complete()
        return got

    expected = [
        100 * step + 20 * place + 10 * replica + n
        for step in range(3)
        for place in range(2)
        for replica in (1, 0)
        for n in range(4)
    ]
    assert run_ranks(2, 1, run) == [expected, expected]


def settled(read, expected):
    """A number a while after it was as expected, or after a minute."""
    end = time.monotonic() + 60
    while read() != expected and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)
    return read()


def test_a_wire_receives_two_messages_ahead_and_none_of_a_later_step():
    def run(transport):
        wires, sends, send = Wires(transport, 0), [], transport.send
        transport.send = lambda *message: sends.append(send(*message)) or sends[-1]
        if transport.share.rank == 0:
            for n in range(6):
                wires.post(1, 0, 0, number(n))
            left = [settled(lambda: [each.complete for each in sends].count(False), 4)]
            transport.maximum("mesh", torch.tensor([0]))
            transport.maximum("mesh", torch.tensor([0]))
            left.append(settled(lambda: [each.complete for each in sends].count(False), 2))
            transport.maximum("mesh", torch.tensor([0]))
            wires.complete()
            return left
        wires.expect(0, 0, 0, 4, NUMBER)
        transport.maximum("mesh", torch.tensor([0]))
        taken = []
        for _ in range(4):
            wires.wait(0, 0, 0)
            taken.append(int(wires.take(0, 0, 0)))
        wires.complete()
        transport.maximum("mesh", torch.tensor([0]))
        transport.maximum("mesh", torch.tensor([0]))
        wires.expect(0, 0, 0, 2, NUMBER)
        wires.complete()
        return taken

    assert run_ranks(2, 1, run) == [[4, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("plan", ["pipelined", "sharded"])
def test_in_inference_a_rank_is_at_most_two_micro_batches_ahead_of_the_next_one(monkeypatch, plan):
    options = Options("eager", device_iterations=20, strategy=Strategy(plan))
    take, post, sent, is_far = Wires.take, Wires.post, [], threading.Event()

    def count(wires, *key_and_value):
        if transport_here().share.rank == 0:
            sent.append(key_and_value)
            if len(sent) > 4:
                is_far.set()
        post(wires, *key_and_value)

    def waits(wires, *key):
        if transport_here().share.rank == 2 and not waited:
            waited.append(is_far.wait(1))
        return take(wires, *key)

    def run(transport):
        with MAKING:
            model = Pipeline(3)
        return compile_inference(model, options)(torch.ones(40, 4))

    waited = []
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())
    monkeypatch.setattr(Wires, "post", count)
    monkeypatch.setattr(Wires, "take", waits)
    run_ranks(1, 3, run)
    assert waited == [False]
    assert len(sent) > 4


def test_changed_is_called_at_each_arrival():
    def run(transport):
        wires, calls = Wires(transport, 0), threading.Semaphore(0)
        wires.changed = calls.release
        wires.expect(0, 0, 0, 2, NUMBER)
        for n in range(2):
            wires.post(0, 0, 0, number(n))
            calls.acquire()
            assert wires.arrived(0, 0, 0) == n + 1
        wires.complete()
        assert not calls.acquire(blocking=False)

    run_ranks(1, 1, run)


@pytest.mark.parametrize("waits", ["wait", "complete", "changed", "send"])
def test_who_waits_for_a_rank_that_is_gone_gets_an_error(waits):
    def run(transport):
        if transport.share.rank == 1:
            raise KeyError
        wires, changed = Wires(transport, 0), threading.Event()
        wires.changed = changed.set
        if waits == "send":
            wires.post(1, 0, 0, number(0))
        else:
            wires.expect(1, 0, 0, 1, NUMBER)
        match waits:
            case "wait":
                wires.wait(1, 0, 0)
            case "changed":
                assert changed.wait(10)
                assert isinstance(wires.error, RankLost)
                wires.post(1, 0, 0, number(0))
            case _:
                wires.complete()

    assert [type(error) for error in run_failing_ranks(2, 1, run)] == [RankLost, KeyError]


def test_a_rank_that_drains_pays_what_it_owes_and_the_next_step_is_whole():
    """It has sent two messages of five on one wire, none on the others, and taken one."""
    vector = TensorType(torch.float64, (3,))

    def run(transport):
        rank, other = transport.share.rank, 1 - transport.share.rank
        wires, kinds = Wires(transport, 0), {0: (NUMBER, 5), 1: (vector, 4), 2: (None, 1)}
        results = []
        for step in range(2):
            for wire, (type_, count) in kinds.items():
                wires.expect(other, wire, 0, count, type_)
                wires.promise(other, wire, 0, count, type_)
            posted = [(0, number(n + 1)) for n in range(5)] + [(1, torch.ones(3).double())] * 4
            posted.append((2, None))
            if rank == 0 and step == 0:
                for wire, value in posted[:2]:
                    wires.post(other, wire, 0, value)
                wires.wait(other, 0, 0)
                assert wires.take(other, 0, 0) == 1
                wires.drain()
                wires.complete()
                continue
            for wire, value in posted:
                wires.post(other, wire, 0, value)
            taken = []
            for wire, (type_, count) in kinds.items():
                for _ in range(count):
                    wires.wait(other, wire, 0)
                    value = wires.take(other, wire, 0)
                    taken.append(None if value is None else value.tolist())
                    assert type_ is None or TensorType.of(value) == type_
            wires.drain()  # owes nothing
            wires.complete()
            results.append(taken)
        return results

    whole = [1, 2, 3, 4, 5, *[[1, 1, 1]] * 4, None]
    drained = [1, 2, 0, 0, 0, *[[0, 0, 0]] * 4, None]
    assert run_ranks(2, 1, run) == [[whole], [drained, whole]]


def test_no_thread_is_left_after_a_step():
    def run(transport):
        wires = Wires(transport, 0)
        wires.expect(0, 3, 0, 1, NUMBER)
        wires.post(0, 3, 0, number(0))
        wires.wait(0, 3, 0)
        wires.complete()
        return settled(lambda: [t.name for t in threading.enumerate() if "(0, 3, 0)" in t.name], [])

    assert run_ranks(1, 1, run) == [[]]
