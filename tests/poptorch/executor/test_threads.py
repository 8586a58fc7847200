"""Check what other threads see of an executor's weights, and that they wait for each other."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.whole_step import lowering
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch import wrapping
from poptorch.weights import note_trainers, trainers_of
from tests.poptorch.executor.models import Weighted

ONE = torch.ones(1)
SECONDS = 20.0  # a thread that waits longer waits for ever


class Many(nn.Module):
    """Every weight is -4k after k calls with four device iterations."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(torch.zeros(16, 16) for _ in range(6))

    def forward(self, x):
        return poptorch.identity_loss(sum(w.sum() for w in self.w) + 0 * x.sum(), "none")


def trainer(model, iterations=1):
    options = poptorch.Options().deviceIterations(iterations)
    return poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    )


def in_thread(action):
    """Start a thread; what it gives, and a function that waits for it."""
    results = []

    def run():
        try:
            results.append(action())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(SECONDS)
        assert not thread.is_alive(), "the thread waits for ever"
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result

    return wait


def test_weights_read_in_another_thread_are_whole_and_new():
    model = Many()
    executor = trainer(model, iterations=4)
    x = torch.ones(4, 2)
    executor(x)
    calls, done, reads = [1], threading.Event(), []

    def read():
        while not done.is_set():
            begun = calls[0]
            values = torch.stack([v.clone() for v in model.state_dict().values()]).unique()
            reads.append((begun, [-v / 4 for v in values.tolist()]))

    wait = in_thread(read)
    for _ in range(60):
        executor(x)
        calls[0] += 1
    done.set()
    wait()
    assert len(reads) > 1
    for begun, seen in reads:
        assert len(seen) == 1
        assert seen[0] >= begun


def test_weights_can_be_read_and_wrapped_while_a_model_around_them_is_compiled():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Weighted(0.0)

        def forward(self, x):
            results.append(in_thread(work)())
            return self.inner(x)

    def work():
        between.append(trainer(around.inner))
        return around.inner.w.item(), len(trainers_of(around))

    around, results, between = Around(), [], []
    executor = trainer(around)
    executor.compile(ONE)
    assert set(results) == {(0.0, 2)}
    executor(ONE)
    between[0](ONE)
    assert around.inner.w.tolist() == [-2.0]
    for each in (executor, *between):
        each.destroy()
    assert type(around.inner.w) is nn.Parameter


def test_a_compilation_waits_for_no_thread_that_waits_for_it():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Weighted(0.0)

        def forward(self, x):
            waits.append(in_thread(train_and_compile))
            assert inside.wait(SECONDS)
            return self.inner(x)

    def train_and_compile():
        inner(ONE)
        return inner._weights.lock.run(compile_another)

    def compile_another():
        inside.set()
        taken = compile_lock().acquire(timeout=SECONDS)
        if taken:
            compile_lock().release()
        return taken

    around, waits, inside = Around(), [], threading.Event()
    inner, outer = trainer(around.inner), trainer(around)
    inner.compile(ONE)
    outer.compile(ONE)
    assert [wait() for wait in waits] == [True]
    outer(ONE)
    assert around.inner.w.tolist() == [-2.0]


def test_one_of_two_threads_that_wrap_a_module_is_refused(monkeypatch):
    model, both, find = Weighted(), threading.Barrier(2), wrapping._tensors

    def slow(module, kind):
        if kind == "_buffers":
            both.wait(SECONDS)
        return find(module, kind)

    monkeypatch.setattr(wrapping, "_tensors", slow)
    made, refused = [], []

    def wrap():
        try:
            made.append(trainer(model))
        except RuntimeError as error:
            refused.append(str(error))

    for wait in [in_thread(wrap) for _ in range(2)]:
        wait()
    assert (len(made), len(refused)) == (1, 1)
    assert "already been wrapped" in refused[0]
    made[0](ONE)
    assert model.w.tolist() == [0.0]
    made[0].destroy()
    assert type(model) is Weighted
    assert type(model.w) is nn.Parameter


def test_executors_may_be_made_while_others_are_destroyed():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    kept = [trainer(Weighted()) for _ in range(100)]
    waits = []
    try:
        for _ in range(2):
            waits.append(in_thread(lambda: [trainer(Weighted()) for _ in range(200)]))
            waits.append(in_thread(lambda: [note_trainers() for _ in range(200)]))
        for wait in waits:
            wait()
    finally:
        sys.setswitchinterval(interval)
        del kept


@pytest.mark.parametrize("look", ["weights", "optimizer"])
def test_a_look_during_a_call_waits_for_its_end(look, monkeypatch):
    model = Weighted()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, None, optimizer)
    executor(ONE)
    inside, go, run = threading.Event(), threading.Event(), CompiledModel.run

    def slow(self, tensors):
        inside.set()
        assert go.wait(SECONDS)
        return run(self, tensors)

    monkeypatch.setattr(CompiledModel, "run", slow)
    waits = [in_thread(lambda: executor(ONE))]
    assert inside.wait(SECONDS)
    if look == "weights":
        waits.append(in_thread(lambda: model.w.tolist()))
    else:
        waits.append(in_thread(lambda: float(optimizer.state_dict()["ipu_state"]["Step___w"])))
    time.sleep(0.05)
    go.set()
    waits[0]()
    seen = waits[1]()
    assert seen == (model.w.tolist() if look == "weights" else 2.0)
    assert model.w.item() == pytest.approx(-1.0)


def test_who_waits_for_weights_goes_before_the_next_call():
    executor = trainer(Weighted())
    lock, order = executor._weights.lock, []
    waits = []

    def call():
        waits.append(in_thread(lambda: lock.run(lambda: order.append("look"))))
        until = time.monotonic() + SECONDS
        while len(lock._turns) < 2 and time.monotonic() < until:
            time.sleep(0.001)

    lock.run(call)
    lock.run(lambda: order.append("call"))
    waits[0]()
    assert order == ["look", "call"]


def test_calls_of_one_executor_from_several_threads_are_made_in_turn():
    model = Weighted(0.0)
    executor = trainer(model)
    executor.compile(ONE)

    def train():
        for _ in range(20):
            executor(ONE)

    for wait in [in_thread(train) for _ in range(3)]:
        wait()
    assert model.w == -60


def test_two_executors_that_follow_each_other_do_not_wait_for_each_other():
    model = Weighted()
    executors = [trainer(nn.Sequential(model)), trainer(nn.Sequential(model))]
    for executor in executors:
        executor(ONE)

    def train(executor):
        for _ in range(30):
            executor(ONE)
            model.state_dict()

    for wait in [in_thread(lambda e=e: train(e)) for e in executors]:
        wait()


def test_one_thread_infers_while_another_trains():
    model = Weighted(0.0)
    training, follower = trainer(model), poptorch.inferenceModel(model)
    training(ONE)
    follower(ONE)
    calls, results = [1], []

    def infer():
        for _ in range(20):
            results.append((calls[0], -float(follower(ONE))))

    wait = in_thread(infer)
    for _ in range(20):
        training(ONE)
        calls[0] += 1
    wait()
    assert all(seen >= begun for begun, seen in results)


def test_hooks_of_a_compilation_may_look_at_weights():
    model = Weighted()
    executor = trainer(model)
    seen = []
    handle = poptorch.registerPreCompileHook(lambda: seen.extend(model.state_dict()))
    try:
        executor(ONE)
    finally:
        handle.remove()
    assert "w" in seen  # its value is none of the trace


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_during_a_call_does_not_wait_for_it():
    lock = trainer(Weighted())._weights.lock
    inside, go = threading.Event(), threading.Event()
    wait = in_thread(lambda: lock.run(lambda: (inside.set(), go.wait(SECONDS))))
    assert inside.wait(SECONDS)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        os._exit(lock.run(lambda: 7))
    go.set()
    wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_operator_of_a_worker_reads_the_weights_that_its_call_trains(monkeypatch):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                x = torch.relu(self.first(x))
            with poptorch.Block("second", ipu_id=1):
                return poptorch.identity_loss(watched(self.second(x)).pow(2), "mean")

    model, seen = Watched(), []

    @torch.library.custom_op("poptorch_thread_tests::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append((threading.current_thread(), float(model.second.weight.abs().max())))
        return x.clone()

    watched.register_fake(torch.empty_like)
    watched.register_autograd(lambda _, gradient: gradient)
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    monkeypatch.setattr(lowering, "workers_for", lambda *_: 2)
    for _ in range(2):  # from the second call on the device has the newer weights
        in_thread(lambda: training(torch.ones(8, 4)))()
    assert len(seen) == 8
    assert len({thread for thread, _ in seen}) == 2  # a worker of each call
    training.destroy()
