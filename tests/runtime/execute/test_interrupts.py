"""Check that a signal at any time leaves complete steps, no thread, and a process that ends."""

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import poptorch
from ipu_dynamo.errors import ExecutionError, IpuError
from ipu_dynamo.tune.intra_op import intra_op_threads
from tests.runtime.execute.tasks.test_workers import chain, step_of
from tests.runtime.execute.transaction.test_transaction import (
    CASES,
    FACADE,
    MORE,
    Case,
    Subject,
    subject_of,
)

PIPELINED = Case(2, adam=True, more=(("gradient_accumulation", 4), ("device_iterations", 3)))


class Told(Exception):
    """What a handler raises."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with intra_op_threads(1):
        yield


@pytest.fixture
def handlers():
    """Handlers that raise, as that of Ctrl-C does."""

    def tell(number, frame):
        raise Told(number)

    numbers = (signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, tell) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def workers_alive() -> list[threading.Thread]:
    """Python also lists threads whose start was interrupted, and which never began."""
    named = [t for t in threading.enumerate() if t.name.startswith("ipu worker")]
    return [t for t in named if t.is_alive()]


def interrupt(subject: Any, number: int, seconds: float) -> int:
    """Make a call, send the signal after so many seconds, and return how many steps it made."""
    subject.reset()
    before = subject.steps
    timer = None
    try:
        try:
            if number == signal.SIGALRM:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            else:
                timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
                timer.start()
            subject.call()
        finally:
            assert not workers_alive()
        if timer is not None:
            timer.join()
        time.sleep(1.0)  # where the call ended before: the signal ends the sleep
    except (KeyboardInterrupt, Told):
        pass
    except (ExecutionError, poptorch.Error) as error:  # raised in an operator
        first: BaseException | None = error
        while first is not None and not isinstance(first, Told):
            first = first.__cause__
        assert first is not None
    if timer is not None:
        timer.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return subject.steps - before


def check_interrupts(subject: Any, count: int) -> set[int]:
    seconds = 0.0
    for _ in range(10):
        subject.reset()
        start = time.perf_counter()
        subject.call()
        seconds += (time.perf_counter() - start) / 10
    draw = random.Random(0)
    seen = set()
    for _ in range(count):
        number = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
        complete = interrupt(subject, number, 1e-6 + draw.random() * 1.2 * seconds)
        assert torch.is_grad_enabled()
        subject.check(complete)
        seen.add(complete)
    return seen


@pytest.fixture
def subject(request):
    name = request.param
    subject = Subject(name) if isinstance(name, Case) else subject_of(name)
    yield subject
    subject.close()


QUICK = [PIPELINED, "threads in the façade", "executors of nested modules"]


@pytest.mark.parametrize("subject", QUICK, indirect=True)
def test_a_signal_at_any_time_leaves_complete_steps(subject, handlers):
    check_interrupts(subject, 20)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [PIPELINED, *CASES, *MORE, *FACADE], indirect=True)
def test_many_signals_leave_complete_steps(subject, handlers):
    assert len(check_interrupts(subject, 200)) > 1


@pytest.mark.few(3)
@pytest.mark.parametrize("worker", [1, 2])
@pytest.mark.parametrize("when", ["before", "after", "no thread"])
def test_an_interrupted_start_of_a_worker_leaves_no_trace(worker, when, monkeypatch):
    subject = Subject(Case(2, more=(("gradient_accumulation", 3), ("replicas", 2), ("workers", 4))))
    start = threading.Thread.start

    def interrupted(thread):
        if thread.name != f"ipu worker {worker}":
            return start(thread)
        if when == "no thread":
            raise RuntimeError("can't start new thread")
        if when == "after":
            start(thread)
            time.sleep(0.005)  # it would be done by now
        raise KeyboardInterrupt

    subject.reset()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            subject.call()
    subject.check(0)


@pytest.mark.parametrize("kind", [Told, KeyboardInterrupt, RuntimeError])
def test_a_signal_while_a_worker_begins_comes_out_of_the_call(kind, monkeypatch):
    """Its handler raises when the thread is there, and `Thread.start` has not returned yet."""
    subject = Subject(Case(2, more=(("gradient_accumulation", 3), ("replicas", 2), ("workers", 4))))
    joinable = hasattr(threading, "_start_joinable_thread")  # from Python 3.13 on
    name = "_start_joinable_thread" if joinable else "_start_new_thread"
    start = getattr(threading, name)

    def interrupted(bootstrap, *args, **kwargs):
        start(bootstrap, *args, **kwargs)
        thread = bootstrap.__self__
        if thread.name == "ipu worker 2":
            while thread in threading._limbo:
                time.sleep(0.001)
            raise kind("told")

    subject.reset()
    with monkeypatch.context() as patch:
        patch.setattr(threading, name, interrupted)
        with pytest.raises(kind, match="told"):
            subject.call()
        assert not workers_alive()
    subject.check(0)


@pytest.mark.parametrize("kind", [Told, KeyboardInterrupt])
def test_a_signal_as_the_wait_for_a_worker_ends_comes_out_of_the_call(kind, monkeypatch):
    """`Thread.start` then says that a lock is not locked, in place of what the handler raised."""
    subject = Subject(Case(2, more=(("gradient_accumulation", 3), ("replicas", 2), ("workers", 4))))
    start, waits_for = threading.Thread.start, []

    def started(thread):
        waits_for.append(thread.name)
        start(thread)

    def wait(event, timeout=None):
        with event._cond:
            event._cond.release()  # as where a handler raises before it is locked again
            if waits_for[-1] == "ipu worker 2":
                raise kind("told")
            event._cond.acquire()

    subject.reset()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(kind, match="told"):
            subject.call()
        assert not workers_alive()
    subject.check(0)


def test_a_worker_that_begins_late_does_nothing(monkeypatch):
    """Ctrl-C while Python waits for a thread that the system has not run yet."""
    subject = Subject(Case(2, more=(("gradient_accumulation", 3),)))
    start, late = threading.Thread.start, []

    def interrupted(thread):
        if thread.name.startswith("ipu worker"):
            late.append(thread)
            start(threading.Timer(0.05, start, (thread,)))
            raise KeyboardInterrupt
        return start(thread)

    subject.reset()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subject.call()
        assert late[0].ident is not None  # it has begun, and the call has waited for its end
        assert not late[0].is_alive()
    subject.check(0)


def test_a_second_call_at_the_same_time_is_refused():
    @torch.library.custom_op("ipu_test::wait_here", mutates_args=())
    def wait_here(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(60)
        return x.clone()

    class Waiting(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.mse_loss(wait_here(super().forward(x)), x)

    wait_here.register_fake(torch.empty_like)
    wait_here.register_autograd(lambda ctx, gradient: gradient)
    inside, go_on = threading.Event(), threading.Event()
    step = step_of(Waiting(3, 3), 1)
    data = torch.randn(2, 3)
    step.compile(data)
    thread = threading.Thread(target=step, args=(data,))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(IpuError, match="another call of this executable is running"):
            step(data)
    finally:
        go_on.set()
        thread.join()
    step(data)


def test_a_call_within_a_call_is_refused(handlers):
    step = step_of(chain(2), 400)
    data = torch.randn(800, 8)
    step.compile(data)
    seen = []

    def call_again(number, frame):
        with pytest.raises(IpuError, match="around this one"):
            step(data)
        seen.append(number)

    signal.signal(signal.SIGALRM, call_again)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    step(data)
    assert seen == [signal.SIGALRM]


def test_interrupted_processes_end():
    """Each child trains with two workers until a signal ends it, wherever that meets it.

    Python drops what a handler raises within a weak reference's callback, so there is a second one.
    """
    step = step_of(chain(2), 6, workers=2)
    data = torch.randn(12, 8)
    step(data)
    draw = random.Random(1)
    children = []
    for _ in range(10):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            _train_until_told(step, data, tell)
        children.append(child)
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(0.05 * draw.random())
        os.kill(child, draw.choice((signal.SIGINT, signal.SIGTERM)))
    again = time.monotonic() + 5
    ends = again + 55
    codes = {}
    while len(codes) < len(children) and time.monotonic() < ends:
        for child in children:
            if child not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(status[1])
            elif child not in codes and time.monotonic() > again:
                os.kill(child, signal.SIGTERM)
        again += 1 if time.monotonic() > again else 0
        time.sleep(0.02)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert set(codes.values()) == {0}
    assert len(codes) == len(children)


def _train_until_told(step, data, ready: int) -> None:
    """Run in a child; 0: no worker was left when the signal came out of the call."""

    def end(number, frame):
        raise SystemExit

    code = 1
    try:
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        os.write(ready, b"!")
        while True:
            step(data)
    except SystemExit:
        code = 2 if workers_alive() else 0
    finally:
        os._exit(code)
