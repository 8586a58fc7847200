"""Check that compiling gives Python's garbage collector back as it was."""

import gc
import weakref
from threading import Thread

import pytest

from ipu_dynamo.collecting import collecting_rarely


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.enable()


class Cycle:
    def __init__(self):
        self.own = self


def test_what_dies_young_is_collected():
    with collecting_rarely():
        assert gc.get_threshold()[2] > 10
        dead = weakref.ref(Cycle())
        young = [[] for _ in range(50_000)]
        assert dead() is None
    assert gc.get_threshold() == (700, 10, 10)
    assert len(young) == 50_000


def test_the_last_block_gives_the_collector_back():
    def inner():
        with collecting_rarely():
            pass

    with collecting_rarely():
        thread = Thread(target=inner)
        thread.start()
        thread.join()
        assert gc.get_threshold()[2] > 10
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_gives_the_collector_back():
    with pytest.raises(ValueError, match="mine"), collecting_rarely():
        raise ValueError("mine")
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_set_otherwise_stays():
    gc.set_threshold(200_000, 10, 10)
    with collecting_rarely():
        assert gc.get_threshold() == (200_000, 10, 10)
    gc.set_threshold(700, 10, 10)
    with collecting_rarely():
        gc.set_threshold(300, 1, 1)
    assert gc.get_threshold() == (300, 1, 1)
    gc.set_threshold(700, 10, 10)
    gc.disable()
    with collecting_rarely():
        assert gc.get_threshold() == (700, 10, 10)
