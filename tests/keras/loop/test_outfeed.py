"""Check that results reach the thread of callbacks in order, and what happens to errors."""

import threading

import pytest

from ipu_dynamo.keras.loop.outfeed import CallbackThread


def test_steps_are_delivered_in_order_in_another_thread():
    delivered, threads = [], set()

    def deliver(step, results):
        delivered.append((step, results))
        threads.add(threading.current_thread())

    before = threading.enumerate()
    with CallbackThread(deliver, depth=2) as thread:
        for step in range(20):
            thread.put(step, [step])
    assert delivered == [(step, [step]) for step in range(20)]
    assert threading.current_thread() not in threads
    assert threading.enumerate() == before


def test_at_most_depth_steps_wait():
    begun, release = threading.Event(), threading.Event()

    def deliver(step, results):
        begun.set()
        release.wait(10)

    with CallbackThread(deliver, depth=2) as thread:
        thread.put(0, [])
        begun.wait(10)
        thread.put(1, [])
        thread.put(2, [])
        writer = threading.Thread(target=thread.put, args=(3, []))
        writer.start()
        writer.join(0.05)
        assert writer.is_alive()
        release.set()
        writer.join(10)
        assert not writer.is_alive()


def test_an_exception_of_a_callback_is_raised_and_nobody_waits():
    delivered = []

    def deliver(step, results):
        delivered.append(step)
        raise KeyError("callback")

    def run():
        with CallbackThread(deliver, depth=1) as thread:
            for step in range(20):
                thread.put(step, [])

    with pytest.raises(KeyError, match="callback"):
        run()
    assert delivered == [0]


def test_an_exception_of_the_program_cancels_what_waits():
    begun, release, delivered = threading.Event(), threading.Event(), []

    def deliver(step, results):
        begun.set()
        release.wait(10)
        delivered.append(step)

    def fail():
        with CallbackThread(deliver, depth=5) as thread:
            for step in range(4):
                thread.put(step, [])
            begun.wait(10)
            threading.Timer(0.05, release.set).start()
            raise ZeroDivisionError("program")

    with pytest.raises(ZeroDivisionError, match="program"):
        fail()
    assert delivered == [0]
