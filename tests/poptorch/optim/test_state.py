"""Check how an optimizer's state moves between host, device and checkpoint."""

import copy
import io

import pytest
import torch

from poptorch import optim

STATE = {
    "ipu_state": {"Accl1___w": torch.ones(2), "Step___w": torch.tensor(3.0)},
    "ipu_param": {"learningRate": torch.tensor(0.1)},
}


class Device:
    """A device whose state changes with every run."""

    def __init__(self):
        self.reads, self.steps = 0, 0.0

    def read_optimizer_state(self):
        self.reads += 1
        state = {"Step___w": torch.tensor(self.steps)}
        return {"ipu_state": state, "ipu_param": {"lossScaling_FLOAT": torch.tensor(1.0)}}

    def run(self, optimizer):
        """What an executor does around a training call."""
        if optimizer.ipu_state_is_dirty:
            self.steps = float(optimizer.get_state_dict()["ipu_state"]["Step___w"])
            optimizer.ipu_state_is_dirty = False
        self.steps += 1
        optimizer.host_state_is_dirty = True


@pytest.fixture(params=[optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB])
def optimizer(request):
    return request.param([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_there_is_no_state_before_a_device(optimizer):
    state = optimizer.state_dict()
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    assert state["param_groups"][0]["lr"] == 0.1
    assert not optimizer.has_state()
    assert not optimizer.ipu_state_is_dirty
    assert not optimizer.host_state_is_dirty


def test_the_device_is_read_only_where_it_is_newer(optimizer):
    device = Device()
    optimizer.connect(device)
    assert optimizer.state_dict()["ipu_state"] is None
    device.run(optimizer)
    device.run(optimizer)
    assert device.reads == 0
    assert optimizer.state_dict()["ipu_state"] == {"Step___w": 2.0}
    assert optimizer.state_dict()["ipu_param"] == {"lossScaling_FLOAT": 1.0}
    assert device.reads == 1
    assert optimizer.has_state()
    device.run(optimizer)
    assert optimizer.get_state_dict()["ipu_state"] == {"Step___w": 3.0}


def test_a_state_is_read_before_the_device_is_left(optimizer):
    device = Device()
    optimizer.connect(device)
    device.run(optimizer)
    optimizer.connect(None)
    device.steps = 100.0
    assert optimizer.state_dict()["ipu_state"] == {"Step___w": 1.0}


def test_a_loaded_state_waits_for_the_device(optimizer):
    device = Device()
    optimizer.connect(device)
    device.run(optimizer)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    device.run(optimizer)
    optimizer.load_state_dict(torch.load(saved))
    assert optimizer.ipu_state_is_dirty
    assert not optimizer.host_state_is_dirty
    assert optimizer.state_dict()["ipu_state"] == {"Step___w": 1.0}
    device.run(optimizer)
    assert optimizer.state_dict()["ipu_state"] == {"Step___w": 2.0}


def test_loading_restores_torchs_part_at_once(optimizer):
    state = {**optimizer.state_dict(), **STATE}
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert (parameter < 1).all()


@pytest.mark.parametrize("missing", ["ipu_state", "ipu_param"])
def test_a_dictionary_of_torchs_is_refused(optimizer, missing):
    state = {**optimizer.state_dict(), **STATE}
    del state[missing]
    text = f"Only IPU optimizer states can be loaded onto the IPU.*lacks {missing}"
    with pytest.raises(RuntimeError, match=text):
        optimizer.load_state_dict(state)


def test_what_was_saved_before_compiling_restores_torchs_part(optimizer):
    state = optimizer.state_dict()
    assert state["ipu_state"] is state["ipu_param"] is None
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.has_state()
    assert not optimizer.ipu_state_is_dirty


def test_a_dictionary_without_device_keeps_what_the_device_has(optimizer):
    optimizer.load_state_dict(optimizer.state_dict() | STATE)
    before = optimizer.state_dict()
    optimizer.load_state_dict(before | {"ipu_state": None, "ipu_param": None})
    assert optimizer.state_dict()["ipu_state"] == before["ipu_state"]


def test_an_empty_dictionary_is_refused(optimizer):
    for load in (optimizer.load_state_dict, optimizer.set_state_dict):
        with pytest.raises(
            RuntimeError, match=r"optimizer state dictionary because it is empty\.$"
        ):
            load({})


def test_a_copy_takes_the_newest_state_and_no_device(optimizer):
    device = Device()
    optimizer.connect(device)
    device.run(optimizer)
    again = copy.deepcopy(optimizer)
    device.run(optimizer)
    assert again.state_dict()["ipu_state"] == {"Step___w": 1.0}
    assert again.ipu_state_is_dirty
    assert not again.host_state_is_dirty
    assert optimizer.state_dict()["ipu_state"] == {"Step___w": 2.0}
