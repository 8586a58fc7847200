"""Check what a call tells of its iterations while it runs."""

import threading

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    Block,
    HostFunction,
    InputError,
    IpuError,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
    load,
    save,
)

PATIENCE = 20.0  # seconds; a test that waits so long has failed


class Two(nn.Module):
    """Two layers on one IPU or two; `watch` sees what the last one makes."""

    def __init__(self, *, ipus=1, watch=None, loss=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.ipus, self.watch, self.loss = ipus, watch, loss

    def forward(self, x):
        with Block("first", ipu_id=0):
            hidden = self.first(x).tanh()
        with Block("second", ipu_id=self.ipus - 1):
            y = self.second(hidden)
            if self.watch is not None:
                y = self.watch(y)
            self.count += 1
            return (y, identity_loss(y.square(), "mean")) if self.loss else y


def inference(ipus, **options):
    watch = options.pop("watch", None)
    model = Two(ipus=ipus, watch=watch).eval()
    return model, compile_inference(model, {"engine": "eager", "device_iterations": 4, **options})


def training(ipus=1, **options):
    model = Two(ipus=ipus, loss=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, compile_training(model, optimizer, {"engine": "eager"} | options)


SCHEDULES = [(1, {}), (2, {}), (2, {"strategy": Strategy("pipelined"), "workers": 2})]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("ipus", "options"), SCHEDULES)
def test_iterations_come_in_order_with_their_rows(ipus, options, replicas):
    _, run = inference(ipus, replicas=replicas, **options)
    told = []
    x = torch.randn(4 * 2 * replicas, 3)
    whole = run(x, on_send=lambda i, y: told.append((i, y, threading.current_thread())))
    assert [i for i, _, _ in told] == [0, 1, 2, 3]
    assert torch.equal(torch.cat([y for _, y, _ in told]), whole)
    assert {thread for _, _, thread in told} == {threading.current_thread()}
    assert torch.equal(run(x), whole)


@pytest.mark.parametrize(("ipus", "options"), SCHEDULES)
def test_the_first_comes_before_the_last_has_run(ipus, options):
    """The last iteration waits, in its last layer, until it has been told of the first one."""
    first, seen = threading.Event(), []

    def watch(y):
        seen.append(first.wait(PATIENCE) if len(seen) == 3 else True)
        return y

    _, run = inference(ipus, watch=HostFunction(watch), **options)
    run.compile(torch.randn(8, 3))  # which runs it, too
    seen.clear()
    run(torch.randn(8, 3), on_send=lambda i, y: first.set())
    assert seen == [True] * 4


def plain_training(model, x, steps):
    """Losses, and weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in x.chunk(steps):
        optimizer.zero_grad()
        _, loss = model(part)
        loss.backward()
        optimizer.step()
        yield loss.detach(), model.first.weight.detach().clone()


FORMS = [
    (1, {}),
    (1, {"gradient_accumulation": 2}),
    (2, {"gradient_accumulation": 4, "strategy": Strategy("pipelined"), "workers": 2}),
]


MODES = [
    {"output_mode": "all"},
    {"output_mode": "final"},
    {"output_mode": "sum"},
    {"output_mode": "every", "return_period": 2},
]


@pytest.mark.few(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ipus", "form"), FORMS)
def test_steps_give_what_a_call_of_one_step_returns(ipus, form, mode):
    told = []
    _, run = training(ipus, device_iterations=4, **mode, **form)
    one = {"output_mode": "all"} if mode["output_mode"] == "every" else mode
    _, alone = training(ipus, **one, **form)
    x = torch.randn(32, 3)
    whole = run(x, on_send=lambda i, y: told.append((i, y)))
    assert [i for i, _ in told] == [0, 1, 2, 3]
    for part, (_, given) in zip(x.chunk(4), told, strict=True):
        for mine, expected in zip(given, alone(part), strict=True):
            assert torch.equal(mine, expected)
    _, silent = training(ipus, device_iterations=4, **mode, **form)
    for mine, expected in zip(whole, silent(x), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("ipus", "form"), [*FORMS, (1, {"engine": "inductor"})])
def test_an_exception_stops_behind_its_step(ipus, form):
    model, run = training(ipus, device_iterations=4, **form)
    theirs = Two(loss=True)
    x = torch.randn(32, 3)
    after = [weight for _, weight in plain_training(theirs, x, 4)]

    def stop(iteration, outputs):
        if iteration == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(x, on_send=stop)
    torch.testing.assert_close(model.first.weight.detach(), after[1])
    goes_on = Two(loss=True)
    goes_on.load_state_dict(model.state_dict())
    *_, (_, last) = plain_training(goes_on, x, 4)
    run(x)
    torch.testing.assert_close(model.first.weight.detach(), last)
    assert (run.executable.fused is not None) == ("engine" in form)  # that form is fused


@pytest.mark.parametrize(("ipus", "options"), SCHEDULES)
def test_an_exception_leaves_buffers_of_inference_as_they_were(ipus, options):
    model, run = inference(ipus, **options)
    x = torch.randn(8, 3)
    expected = run(x)
    count = model.count.clone()

    def stop(iteration, outputs):
        raise InputError("enough")

    with pytest.raises(InputError, match="enough"):
        run(x, on_send=stop)
    assert torch.equal(model.count, count)
    assert torch.equal(run(x), expected)


def test_it_runs_as_the_caller_does_and_must_not_call_again():
    _, run = training(device_iterations=2)
    x, modes = torch.randn(8, 3), []

    def look(iteration, outputs):
        modes.append(torch.is_grad_enabled())
        with pytest.raises(IpuError, match="another call of this executable is running"):
            run(x)

    run(x, on_send=look)
    with torch.no_grad():
        run(x, on_send=look)
    assert modes == [True, True, False, False]


def test_loaded_programs_tell_too(tmp_path):
    _, run = training(device_iterations=2)
    x, told = torch.randn(8, 3), []
    run(x)
    save(run, tmp_path / "file")
    whole = load(tmp_path / "file")(x, on_send=lambda i, y: told.append(y[1]))
    assert torch.equal(told[-1], whole[1])
    assert len(told) == 2
