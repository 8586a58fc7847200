"""Check that handlers wait for the end of a block, whatever they raise, and are put back."""

import os
import signal
import threading

import pytest

from ipu_dynamo.ops.private.deferred_signals import DeferredSignals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)


class Told(Exception):
    """What a handler raises."""


@pytest.fixture
def handlers():
    """A handler of its own for each signal, which raises."""

    def make(number):
        def handler(_, frame):
            raise Told(number)

        return handler

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: make(number) for number in SIGNALS}
    for number, handler in ours.items():
        signal.signal(number, handler)
    yield ours
    for number, handler in before.items():
        signal.signal(number, handler)


def in_place(handlers):
    return all(signal.getsignal(number) is handler for number, handler in handlers.items())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_waits_for_the_end_of_the_block(handlers, number):
    done = []

    def block():
        with DeferredSignals():
            os.kill(os.getpid(), number)
            done.append("after the signal")

    with pytest.raises(Told) as caught:
        block()
    assert caught.value.args == (number,)
    assert done
    assert in_place(handlers)


def test_every_signal_is_handled_when_one_handler_raises(handlers):
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def block():
        with DeferredSignals():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(os.getpid(), number)

    with pytest.raises(Told) as caught:
        block()
    assert seen == [signal.SIGUSR1]
    assert {caught.value.args[0], caught.value.__context__.args[0]} == {
        signal.SIGTERM,
        signal.SIGINT,
    }


def test_an_error_of_the_block_is_seen_beside_a_signal(handlers):
    def block():
        with DeferredSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("of the block")

    with pytest.raises(Told) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)
    assert in_place(handlers)


def test_a_block_may_be_entered_again(handlers):
    held = DeferredSignals()
    for _ in range(3):
        with held:
            pass
        assert in_place(handlers)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with held:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the system's own, no Python
        assert signal.getsignal(signal.SIGINT) is not handlers[signal.SIGINT]


def test_a_thread_that_runs_no_handlers_changes_none(handlers):
    found = []

    def run():
        with DeferredSignals():
            found.append(in_place(handlers))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


def test_handlers_are_put_back_when_one_is_called_while_they_are_swapped(handlers, monkeypatch):
    """Wherever in the block's begin and end a signal comes."""
    from ipu_dynamo.ops.private import deferred_signals

    change = deferred_signals.set_signal
    for moment in range(2 * len(SIGNALS)):
        calls = []

        def changed(number, handler, calls=calls, moment=moment):
            change(number, handler)
            calls.append(number)
            if len(calls) == moment + 1:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(deferred_signals, "set_signal", changed)
            with pytest.raises(Told), DeferredSignals():
                pass
        assert in_place(handlers), moment
