"""Check that of two copies the newer one wins, whatever fails and whoever asks."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.errors import UpdateError
from ipu_dynamo.whole_step.weights.dual_view import DualView, NoSync

NAMES = ("trained", "frozen")
SECONDS = 20.0


class Device:
    """A device with a copy of some host tensors; its steps add one to `trained`."""

    written = frozenset({"trained"})

    def __init__(self, host):
        self.host, self.complete, self.fails = host, True, False
        self.own = {name: tensor.clone() for name, tensor in host.items()}

    def weights(self):
        return self.host

    def has_weights(self):
        return self.complete

    def read_weights(self, names):
        if not self.complete:
            raise UpdateError("an update failed", hint="")
        self._copy(names, self.own, self.host)

    def write_weights(self, names):
        self._copy(names, self.host, self.own)

    def _copy(self, names, source, target):
        for name in sorted(names):
            if self.fails:
                raise KeyboardInterrupt
            target[name].copy_(source[name])

    def step(self):
        self.own["trained"] += 1


def view_of(host):
    view = DualView(host["trained"])  # a tensor can be held weakly
    device = Device(host)
    view.connect(device)
    return view, device


def tensors():
    return {name: torch.zeros(()) for name in NAMES}


def values(of):
    return [of[name].item() for name in NAMES]


@given(st.lists(st.sampled_from(["step", "host", "read", "failed read", "failed write"])))
def test_the_last_change_of_each_variable_is_on_both_sides_after_a_copy(actions):
    view, device = view_of(tensors())
    expected = [0.0, 0.0]
    for action in actions:
        device.fails = action.startswith("failed")
        try:
            if action == "host":
                view.sync_host()  # as a user reads before a change
                for tensor in device.host.values():
                    tensor.add_(10)
                view.modify_host()
                expected = [value + 10 for value in expected]
            elif action.endswith("read"):
                view.sync_host()
            else:
                view.sync_device()
                view.modify_device()
                device.step()
                expected[0] += 1
        except KeyboardInterrupt:
            assert device.fails
        assert not view.newer_on_device & view.newer_on_host
    device.fails = False
    view.sync_device()
    view.sync_host()
    assert values(device.host) == values(device.own) == expected


def test_an_update_that_failed_half_way_leaves_the_host_as_it_is():
    view, device = view_of(tensors())
    view.modify_device()
    device.step()
    device.complete = False
    assert not view.sync_host()
    assert values(device.host) == [0, 0]
    with pytest.raises(UpdateError):
        view.sync_host(required=True)
    device.complete = True
    assert view.sync_host()
    assert values(device.host) == [1, 0]


def test_another_view_follows_what_a_device_has_changed_since():
    host = tensors()
    (trains, device), (follows, other) = view_of(host), view_of(host)
    seen = trains.version
    assert trains.changed_since(seen) == frozenset()
    trains.modify_device()
    device.step()
    assert trains.changed_since(seen) == {id(host["trained"])}
    trains.sync_host()
    follows.follow(trains.changed_since(seen))
    follows.sync_device()
    assert values(other.own) == [1, 0]
    seen = trains.version
    trains.publish()
    assert trains.changed_since(seen) == set(map(id, host.values()))


def test_writes_of_the_host_are_counted_until_the_next_count():
    view, device = view_of(tensors())
    assert view.count_host_writes() == set(NAMES)  # none is known before
    device.host["frozen"].add_(1)
    assert view.count_host_writes() == {"frozen"}
    assert view.count_host_writes() == frozenset()


def test_a_read_waits_for_a_call_but_within_it():
    view, device = view_of(tensors())
    inside, go, seen = threading.Event(), threading.Event(), []

    def call():
        view.modify_device()
        view.refresh()  # by the caller itself: the step is not complete
        seen.append(device.host["trained"].item())
        inside.set()
        assert go.wait(SECONDS)
        device.step()

    def read():
        view.refresh()
        seen.append(device.host["trained"].item())

    threads = [threading.Thread(target=lambda: view.lock.run(call))]
    threads[0].start()
    assert inside.wait(SECONDS)
    with NoSync([view]):
        view.refresh()  # returns
    threads.append(threading.Thread(target=read))
    threads[1].start()
    end = time.monotonic() + SECONDS
    while len(view.lock._turns) < 2:  # until it waits
        assert time.monotonic() < end
    assert seen == [0]
    go.set()
    for thread in threads:
        thread.join(SECONDS)
    assert seen == [0, 1]


def test_a_view_without_a_program_copies_nothing():
    view, device = view_of(tensors())
    view.modify_device()
    device.step()
    view.disconnect()
    view.refresh()
    assert not view.fetch()
    assert values(device.host) == [0, 0]
