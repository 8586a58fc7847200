"""Check what the forms of a step report to observers, and that unobserved events cost nothing."""

import sys
import threading
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training
from ipu_dynamo.runtime.engines.replay.replay import Repetition
from ipu_dynamo.runtime.execute import replayed_step
from ipu_dynamo.runtime.execute.host_io.print_queue import PrintQueue
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.runtime.execute.observer import NOBODY, Observer, joined
from ipu_dynamo.testing import assert_same_bits

ITERATIONS = 3
EVENTS = [*Observer.__annotations__]
MEASURED = ("values_held", "instruction_ended")  # which take Python of their own
OBSERVER_FILE = joined.__code__.co_filename


class Net(nn.Module):
    """Two layers, on an IPU each if wanted."""

    def __init__(self, ipus):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        if ipus == 2:
            BeginBlock(self.a, ipu_id=0)
            BeginBlock(self.b, ipu_id=1)

    def forward(self, x):
        return F.mse_loss(self.b(torch.tanh(self.a(x))), x[:, :2])


# IPUs, micro-batches of a step, and options
FORMS = {
    "loop": (2, 2, {"strategy": Strategy("sharded")}),
    "workers": (2, 4, {"strategy": Strategy("pipelined"), "workers": 2}),
    "fused": (1, 1, {"force": {"FuseStep": True}}),
}
REPLAYED = pytest.param("replayed", marks=pytest.mark.inductor)
FORMS["replayed"] = (1, 1, {"engine": "inductor"})


class Recorder(Observer):
    """Records events by name, each with the thread and the arguments.

    Args:
        events: those that it follows.
    """

    def __init__(self, events=EVENTS, act=None):
        self.seen, self._act = [], act
        for event in events:
            setattr(self, event, lambda *arguments, event=event: self._note(event, arguments))

    def _note(self, event, arguments):
        self.seen.append((event, threading.current_thread(), arguments))
        if self._act is not None:
            self._act(event, arguments)

    def of(self, *events):
        return [arguments for event, _, arguments in self.seen if event in events]


def compiled(form, iterations=ITERATIONS):
    ipus, accumulation, options = FORMS[form]
    model = Net(ipus)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"engine": "eager", "workers": 1, "output_mode": "all"} | options
    step = compile_training(
        model,
        optimizer,
        Options(device_iterations=iterations, gradient_accumulation=accumulation, **chosen),
    )
    data = torch.randn(iterations * accumulation * 2, 3)
    step.compile(data)
    assert (step.executable.fused is not None) == (form in ("fused", "replayed"))
    return step, data


@pytest.mark.parametrize("form", ["loop", "workers", "fused", REPLAYED])
def test_each_form_reports_all_events_of_a_call(form):
    ipus, accumulation, _ = FORMS[form]
    step, data = compiled(form)
    plain, _ = compiled(form)
    step.executable.timeline = recorder = Recorder()
    assert torch.equal(step(data), plain(data))
    micro_batches = ITERATIONS * accumulation
    seen = [event for event, _, _ in recorder.seen]
    assert (seen[0], seen[-1]) == ("call_began", "call_ended")
    assert recorder.of("call_began") == [(micro_batches,)]
    assert [complete for _, complete in recorder.of("call_ended")] == [True]
    for event, ends in (("received", 1), ("sent", ipus)):
        times = recorder.of(event)
        assert Counter(k for k, _ in times) == dict.fromkeys(range(micro_batches), ends)
        assert all(begin <= end for _, (begin, end) in times)
    passes = len(step.executable.schedule.passes)
    assert len(recorder.of("task_ended")) == micro_batches * passes
    assert [k for k, _ in recorder.of("update_began")] == [*range(ITERATIONS)]
    steps = [event for event in seen if event in ("update_began", "step_ended", "iteration_ended")]
    assert steps == ["update_began", "step_ended", "iteration_ended"] * ITERATIONS
    here = threading.current_thread()
    of_workers = ("received", "sent", "task_ended", *MEASURED)
    assert {thread for event, thread, _ in recorder.seen if event not in of_workers} == {here}
    workers = {worker for worker, *_ in recorder.of("task_ended")}
    assert workers == ({0, 1} if form == "workers" else {0})


@pytest.mark.parametrize("form", ["loop", "workers", "fused", REPLAYED])
def test_variables_are_read_as_they_are_at_both_ends_of_an_update(form):
    accumulation = FORMS[form][1]
    step, data = compiled(form)
    read = []

    def look(event, arguments):
        if event in ("update_began", "step_ended"):
            read.append(arguments[1]("a.weight", 0).clone())

    step.executable.timeline = Recorder(act=look)
    expected, other = [], Net(1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for part in data.chunk(ITERATIONS):
        expected.append(other.a.weight.detach().clone())
        optimizer.zero_grad()
        sum(other(x) / accumulation for x in part.chunk(accumulation)).backward()
        optimizer.step()
        expected.append(other.a.weight.detach().clone())
    step(data)
    torch.testing.assert_close(read, expected)


@pytest.mark.parametrize("form", ["loop", "workers", "fused"])
def test_an_error_of_an_observer_ends_the_call_after_the_last_complete_step(form):
    step, data = compiled(form)
    single, _ = compiled(form, iterations=1)

    def fail(event, arguments):
        if event == "update_began" and arguments[0] == 1:
            raise KeyError("enough")

    step.executable.timeline = recorder = Recorder(act=fail)
    with pytest.raises(KeyError, match="enough"):
        step(data)
    assert [complete for _, complete in recorder.of("call_ended")] == [False]
    assert step.executable.step == 1
    single(data.chunk(ITERATIONS)[0])
    assert_same_bits(step.model.state_dict(), single.model.state_dict())


def test_joined_observers_are_called_in_their_order_and_others_are_not_there():
    told = []
    first, second = Observer(), Observer()
    first.step_ended = lambda step, read: told.append("first")
    second.step_ended = lambda step, read: told.append("second")
    second.sent = lambda place, times: told.append("sent")
    both = joined(None, first, second)
    both.step_ended(0, None)
    both.sent(0, None)
    assert told == ["first", "second", "sent"]
    assert [event for event in EVENTS if getattr(both, event)] == ["sent", "step_ended"]
    assert joined(None, second) is second
    assert joined(None, None) is NOBODY


def test_values_that_wait_for_others_are_printed_when_the_call_has_ended():
    printed = []
    queue = PrintQueue([lambda value: printed.append(value.item())] * 2)
    for stream, micro_batch in ((0, 2), (1, 1), (1, 0)):  # (0, 0) failed, and all wait for it
        queue.printed(stream, micro_batch, torch.tensor(10 * micro_batch + stream))
    assert printed == []
    queue.call_ended(None, False)
    assert printed == [1, 11, 20]


def python_calls(step, data):
    """How many functions of Python a call enters."""
    count = [-1]  # the end of the profile

    def profile(frame, event, _):
        count[0] += event == "call"

    sys.setprofile(profile)
    try:
        step(data)
    finally:
        sys.setprofile(None)
    return count[0]


@pytest.mark.parametrize("form", ["loop", "fused"])
def test_an_event_costs_no_more_calls_than_its_observers_make(form):
    """The observer's own methods are C functions here, which are not counted."""
    step, data = compiled(form)
    for _ in range(2):
        step(data)
    plain = python_calls(step, data)
    for event in (event for event in EVENTS if event not in MEASURED):
        step.executable.timeline = observer = Observer()
        setattr(observer, event, "".format)
        more = python_calls(step, data) - plain
        assert more == (ITERATIONS if form == "fused" else 0), event


@pytest.mark.parametrize("form", ["loop", "workers", "fused", REPLAYED])
def test_a_step_without_an_observer_enters_no_function_of_one(form):
    step, data = compiled(form)
    step(data)
    entered = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and (code.co_filename == OBSERVER_FILE or "report" in code.co_name):
            entered.append(code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        step(data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert entered == ["joined"]  # once for the call, and never for a step


@pytest.mark.inductor
@pytest.mark.parametrize("event", EVENTS)
def test_repeated_steps_run_without_python_between_them_unless_an_event_is_there(
    event, monkeypatch
):
    step, data = compiled("replayed")
    ends, advance = [], Repetition.advance

    def noted(steps, end, seconds):
        ends.append(end)
        advance(steps, end, seconds)

    monkeypatch.setattr(replayed_step, "SECONDS", 60.0)
    monkeypatch.setattr(Repetition, "advance", noted)
    step.executable.timeline = recorder = Recorder([event])
    step(data)
    between = event in ("update_began", "step_ended", "iteration_ended", "printed")
    assert ends == ([1, 2, 3] if between else [3])
    times = [arguments[-1] for arguments in recorder.of("received", "sent", "task_ended")]
    assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_transfer_times_cost_no_call_for_each_micro_batch():
    more = []
    for iterations in (2, 5):
        step, data = compiled("loop", iterations)
        step(data)
        plain = python_calls(step, data)
        step.executable.transfers = TransferTimes()
        more.append(python_calls(step, data) - plain)
    assert more[0] == more[1]
