"""Check that a number of intra-op threads holds for a while in one thread, and is put back."""

import threading
import time

import pytest
import torch

from ipu_dynamo.tune import intra_op
from ipu_dynamo.tune.intra_op import intra_op_threads, set_intra_op_threads
from ipu_dynamo.tune.microbenchmark import one_thread


@pytest.fixture(autouse=True)
def three_threads():
    with intra_op_threads(3):
        yield
        assert torch.get_num_threads() == 3


def number_of_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("number", "found"), [(None, 3), (3, 3), (2, 2), (1, 1)])
def test_none_is_the_number_of_torch(number, found):
    with intra_op_threads(number):
        assert torch.get_num_threads() == found


def test_the_number_is_put_back_after_an_error():
    with pytest.raises(ValueError, match="inside"), intra_op_threads(1):
        raise ValueError("inside")
    assert torch.get_num_threads() == 3


def test_an_interrupt_while_it_is_set_puts_it_back(monkeypatch):
    change = intra_op._setter()

    def interrupted(number):
        change(number)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(intra_op, "_setter", lambda: interrupted)
    with pytest.raises(KeyboardInterrupt), intra_op_threads(1):
        pass
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("context", [lambda: intra_op_threads(7), one_thread])
def test_a_thread_that_begins_meanwhile_has_the_number_of_the_process(context):
    expected = number_of_a_new_thread()
    with context():
        assert torch.get_num_threads() in (1, 7)
        assert number_of_a_new_thread() == expected
    assert number_of_a_new_thread() == expected


def test_a_thread_has_the_number_that_it_set():
    found = []

    def run():
        set_intra_op_threads(5)
        found.append(torch.get_num_threads())
        found.append((torch.ones(300, 300) @ torch.ones(300, 300)).sum().item())
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [5, 300.0**3, 5]
    assert torch.get_num_threads() == 3


def test_products_follow_the_number():
    """One thread computes a product where one is set, as the processor's clocks say."""
    a = torch.randn(600, 600)
    with intra_op_threads(2):
        a @ a
    with intra_op_threads(1):
        a @ a
        alone, everybody = time.thread_time(), time.process_time()
        for _ in range(20):
            a @ a
        alone, everybody = time.thread_time() - alone, time.process_time() - everybody
    assert alone > 0.8 * everybody
