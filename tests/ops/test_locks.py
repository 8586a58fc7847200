"""Check that a lock with a queue lets each caller in, in turn, whatever ends those before it."""

import signal
import sys
import threading
import time

import pytest

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private import locks
from ipu_dynamo.ops.private.locks import QueueLock, callers, work_for

SECONDS = 20.0  # a thread that waits longer waits for ever


class Interrupt(Exception):
    """What a signal's handler raises."""


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_thread(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def ends(thread):
    thread.join(SECONDS)
    return not thread.is_alive()


class Held:
    """A lock that another thread holds until it is let go."""

    def __init__(self):
        self.lock, self.let_go, begun = QueueLock(), threading.Event(), threading.Event()
        self.order = []
        self.thread = in_thread(lambda: self.lock.run(lambda: (begun.set(), self.let_go.wait())))
        assert begun.wait(SECONDS)

    def append(self, name):
        """Ask for the lock, to note a name."""
        self.lock.run(lambda: self.order.append(name))

    def append_later(self, name):
        """The same in a thread, which waits now."""
        waiting = len(self.lock._turns)
        thread = in_thread(lambda: self.append(name))
        until(lambda: len(self.lock._turns) > waiting)
        return thread


@pytest.fixture
def alarm():
    """Set a handler for the alarm, and send it while this thread waits."""
    before = signal.getsignal(signal.SIGALRM)

    def arrange(handler):
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield arrange
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_threads_get_the_lock_in_the_order_in_which_they_ask():
    held = Held()
    threads = [held.append_later(number) for number in range(8)]
    held.let_go.set()
    assert all(map(ends, threads))
    assert held.order == list(range(8))


def test_a_thread_whose_wait_is_interrupted_lets_none_in_before_the_lock_is_free(alarm):
    held = Held()
    later = []

    def interrupt():
        later.append(held.append_later("next"))
        raise Interrupt

    alarm(interrupt)
    with pytest.raises(Interrupt):
        held.append("interrupted")
    time.sleep(0.05)
    assert held.order == []
    held.let_go.set()
    assert ends(*later)
    assert held.order == ["next"]


def test_a_handler_goes_before_the_thread_that_it_interrupts(alarm):
    held = Held()
    later = []

    def handle():
        later.append(held.append_later("next"))
        threading.Timer(0.05, held.let_go.set).start()
        held.append("handler")

    alarm(handle)
    held.append("thread")
    assert ends(*later)
    assert held.order == ["handler", "thread", "next"]


def test_the_caller_takes_the_lock_again_as_do_its_workers():
    lock, seen = QueueLock(), []

    def work(me):
        work_for(me)
        lock.run(lambda: seen.append(lock.held_here()))

    def call():
        me = callers()
        lock.run(lambda: seen.append(lock.held_here()))
        assert ends(in_thread(lambda: work(me)))

    lock.run(call)
    assert seen == [True, True]
    assert not lock.held_here()


def test_one_of_two_callers_that_wait_for_each_other_is_refused():
    first, second, both, results = QueueLock(), QueueLock(), threading.Barrier(2), []

    def call(own, other):
        def look():
            both.wait(SECONDS)
            try:
                results.append(other.run(lambda: "read"))
            except IpuError as error:
                results.append(str(error))

        own.run(look)

    threads = [in_thread(lambda: call(first, second)), in_thread(lambda: call(second, first))]
    assert all(map(ends, threads))
    refused, read = sorted(results, key=lambda result: result == "read")
    assert read == "read"
    assert "two calls wait for each other" in refused


def test_a_worker_has_no_part_in_what_another_worker_holds():
    lock, order, inside, go = QueueLock(), [], threading.Event(), threading.Event()

    def hold():
        order.append("first")
        inside.set()
        assert go.wait(SECONDS)
        order.append("first ends")

    def work(threads, action):
        work_for(threads)
        lock.run(action)

    me = callers()
    workers = [in_thread(lambda: work(me, hold))]
    assert inside.wait(SECONDS)
    assert not lock.held_here()
    workers.append(in_thread(lambda: work(me, lambda: order.append("second"))))
    until(lambda: len(lock._turns) == 2)
    go.set()
    assert all(map(ends, workers))
    assert order == ["first", "first ends", "second"]


def test_a_handler_that_would_wait_for_its_own_thread_is_refused(alarm):
    """Its thread waits for a lock, and the holder of another one waits behind it."""
    held, other, results = Held(), QueueLock(), []

    def queue_behind():
        held.append("behind")

    def handle():
        waiting = len(held.lock._turns)
        later.append(in_thread(lambda: other.run(queue_behind)))
        until(lambda: len(held.lock._turns) > waiting)
        try:
            other.run(lambda: results.append("read"))
        except IpuError as error:
            results.append(str(error))
        held.let_go.set()

    later = []
    alarm(handle)
    held.append("thread")
    assert all(map(ends, later))
    assert held.order == ["thread", "behind"]
    (refusal,) = results
    assert "two calls wait for each other" in refusal


@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_at_any_time_leaves_the_lock_to_others(waits):
    """Python runs handlers after calls of C functions, and when a function begins."""
    entered, place = [], -1
    while not entered:
        place += 1
        held, left = Held(), [place]
        if waits:
            threading.Timer(0.01, held.let_go.set).start()
        else:
            held.let_go.set()
            assert ends(held.thread)

        def interrupt(frame, event, _, left=left):
            if frame.f_code.co_filename == locks.__file__ and event in ("c_return", "call"):
                left[0] -= 1
                if left[0] < 0:
                    sys.setprofile(None)
                    raise Interrupt

        sys.setprofile(interrupt)
        try:
            held.append("this")
            entered.append(left[0] >= 0)
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not held.lock.held_here()
        assert ends(in_thread(lambda held=held: held.append("other"))), f"interrupted at {place}"
        assert held.order[-1] == "other"
        assert not locks._waiting
    assert place > 5
