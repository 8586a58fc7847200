"""Check that who waits is woken up, and that a handler that raises leaves nothing locked."""

import signal
import threading
import time

from ipu_dynamo.runtime.changes import Changes


class Told(Exception):
    """What a handler raises."""


def interrupted_waits(changes, seconds):
    """Signals at all times while two threads hand a number to and fro; how often one was raised."""
    turn, end = [0], time.monotonic() + seconds

    def take():
        turn[0] += 1

    def answer():
        while time.monotonic() < end:
            if changes.wait_for(lambda: turn[0] % 2 == 1, 0.01):
                changes.make(take)

    def tell(number, frame):
        raise Told

    before = signal.signal(signal.SIGALRM, tell)
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    raised = 0
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    if changes.wait_for(lambda: turn[0] % 2 == 0, 0.01):
                        changes.make(take)
            except Told:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread.join(5)
    assert not thread.is_alive(), "it waits for a lock that nobody holds"
    return raised


def test_a_handler_that_raises_leaves_nothing_locked():
    assert interrupted_waits(Changes(), 1.0) > 100


def test_who_waits_is_woken_up():
    changes, values = Changes(), []
    threading.Timer(0.05, changes.make, (lambda: values.append(1),)).start()
    assert changes.wait_for(lambda: bool(values), 60)


def test_who_waits_for_too_long_goes_on():
    assert not Changes().wait_for(lambda: False, 0.01)
