"""Check that reading ahead keeps order, bounds and errors, and ends its thread."""

import itertools
import threading
import time

import pytest

from ipu_dynamo.keras.loop.data import infeed
from ipu_dynamo.keras.loop.data.infeed import Infeed


def test_items_come_in_order_and_the_thread_ends():
    before = threading.enumerate()
    feed = Infeed(iter(range(100)), depth=3)
    assert list(feed) == list(range(100))
    feed.close()
    assert threading.enumerate() == before


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_most_depth_items_are_read_ahead(depth):
    asked = []
    feed = Infeed((asked.append(i) or i for i in itertools.count()), depth)
    items = iter(feed)
    for taken in range(1, 4):
        next(items)
        deadline = time.monotonic() + 5
        while len(asked) < taken + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # time in which a thread without a bound would read more
        assert len(asked) == taken + depth
    feed.close()


def test_an_exception_of_the_source_comes_at_its_place():
    def source():
        yield 1
        yield 2
        raise OSError("disk")

    feed = Infeed(source(), depth=5)
    items = iter(feed)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(items)
    feed.close()


def test_a_source_that_does_not_return_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(infeed, "_PATIENCE", 0.05)
    asked, release = threading.Event(), threading.Event()

    def source():
        yield 1
        asked.set()
        release.wait(10)
        yield 2

    feed = Infeed(source(), depth=1)
    assert next(iter(feed)) == 1
    asked.wait(10)
    feed.close()
    assert "has not returned" in caplog.text
    release.set()
    feed._thread.join(5)
    assert not feed._thread.is_alive()
