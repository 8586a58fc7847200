"""Check that threads that train, wrap, destroy and read nested modules do not block each other."""

import gc
import random
import sys
import threading
import time
import traceback
from graphlib import TopologicalSorter

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.ops.private.locks import QueueLock
from ipu_dynamo.whole_step import compiled_model
from poptorch import host_weights, weights
from poptorch.executor import compilation
from poptorch.unwrapping import is_wrapped
from tests.poptorch.executor.models import Layer

THREADS, SECONDS = 20, 240.0


class LockOrder:
    """In which order threads take locks: for each lock those that were held when it was taken."""

    def __init__(self):
        self.before, self._here = {}, threading.local()

    def recorded(self, lock):
        return RecordedLock(self, lock)

    @property
    def held(self):
        if not hasattr(self._here, "locks"):
            self._here.locks = []
        return self._here.locks


class RecordedLock:
    def __init__(self, order, lock):
        self._order, self._lock = order, lock

    def __enter__(self):
        held = self._order.held
        if self not in held:
            self._order.before.setdefault(self, set()).update(held)
        self._lock.acquire()
        held.append(self)

    def __exit__(self, *_):
        self._lock.release()
        self._order.held.remove(self)


@pytest.fixture
def order(monkeypatch):
    order, freed, run, free = LockOrder(), set(), QueueLock.run, poptorch.PoplarExecutor.__del__

    def recorded(lock, action):
        held = order.held
        if lock not in held and lock not in freed:
            order.before.setdefault(lock, set()).update(held)

        def noted():
            held.append(lock)
            try:
                return action()
            finally:
                held.remove(lock)

        return run(lock, noted)

    def free_recorded(executor):
        freed.add(executor._weights.lock)  # nobody waits for it any more
        free(executor)

    monkeypatch.setattr(QueueLock, "run", recorded)
    monkeypatch.setattr(poptorch.PoplarExecutor, "__del__", free_recorded)
    monkeypatch.setattr(host_weights, "_host_lock", order.recorded(threading.RLock()))
    compiling = order.recorded(compiled_model.compile_lock())
    for module in (compiled_model, compilation):
        monkeypatch.setattr(module, "compile_lock", lambda: compiling)
    return order


def is_expected(error):
    """Whether this is how a thread is told that another one has wrapped a module before it."""
    return type(error) is RuntimeError and "has already been wrapped" in str(error)


def operate(modules, executors, operations, refused, failed):
    x = torch.ones(2, 4)
    try:
        for index, operation in operations:
            module, executor = modules[index], executors.get(index)
            # others may wrap, destroy or trace it meanwhile: nothing is asked of the results
            try:
                if operation == "read":
                    module.own.weight.detach().sum().item()
                elif operation == "wrap" and executor is None:
                    options = poptorch.Options().showCompilationProgressBar(False)
                    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1)
                    executors[index] = poptorch.trainingModel(module, options, optimizer)
                elif operation == "train" and executor is not None:
                    executor(x)
                elif operation == "destroy" and executor is not None:
                    executors.pop(index, None)
                    executor.destroy()
            except Exception as error:
                if not is_expected(error):
                    raise
                refused.append(operation)
    except BaseException as error:
        failed.append(error)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_no_order_of_locks_has_a_cycle(order, count):
    leaves = [Layer() for _ in range(6)]
    middle = [Layer(*leaves[at : at + 2]) for at in (0, 2, 4)]
    modules = [Layer(*middle), *middle, *leaves]
    executors, refused, failed, choose = {}, [], [], random.Random(count)
    kinds, weights = ("train", "wrap", "destroy", "read"), (5, 3, 1, 5)
    threads = []
    for _ in range(THREADS):
        names = choose.choices(kinds, weights, k=count)
        operations = [(choose.randrange(10), name) for name in names]
        arguments = (modules, executors, operations, refused, failed)
        threads.append(threading.Thread(target=operate, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [sys._current_frames().get(thread.ident) for thread in threads if thread.is_alive()]
    text = "\n".join("".join(traceback.format_stack(frame)[-8:]) for frame in stuck if frame)
    assert not stuck, text
    told = ["".join(traceback.format_exception(error)) for error in failed]
    assert not failed, "\n".join([f"{len(failed)} threads failed", *told[:3]])
    assert set(refused) <= {"wrap", "train"}
    TopologicalSorter(order.before).prepare()  # raises CycleError
    assert any(order.before.values())
    for executor in list(executors.values()):
        executor.destroy()
    gc.collect()
    assert not any(map(is_wrapped, [*modules, *modules[0].parameters()]))


def test_operators_that_read_each_others_weights_are_refused_where_they_would_wait():
    layers, both = {}, threading.Barrier(2)

    @torch.library.custom_op("ipu_test::look", mutates_args=())
    def look(x: torch.Tensor, number: int) -> torch.Tensor:
        if number in layers:
            both.wait(30)
            return x + layers[number].weight.detach().sum()
        return x.clone()

    look.register_fake(lambda x, number: torch.empty_like(x))
    look.register_autograd(lambda ctx, gradient: (gradient, None))

    class Net(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.own, self.number = nn.Linear(4, 4), number

        def forward(self, x):
            return poptorch.identity_loss(look(self.own(x), self.number), "mean")

    nets, results, x = [Net(0), Net(1)], [], torch.ones(2, 4)
    executors = []
    for net in nets:
        options = poptorch.Options().showCompilationProgressBar(False)
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        executors.append(poptorch.trainingModel(net, options, optimizer))
        executors[-1](x)
    layers.update({0: nets[1].own, 1: nets[0].own})

    def call(executor):
        try:
            results.append(executor(x))
        except poptorch.Error as error:
            results.append(error)

    threads = [threading.Thread(target=call, args=(e,), daemon=True) for e in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    refused = [str(result) for result in results if isinstance(result, poptorch.Error)]
    assert len(refused) == 1
    assert "two executors wait for each other" in refused[0]
    layers.clear()
    for executor in executors:
        executor(x)  # the step of the refused one was undone
        executor.destroy()


def test_waiting_for_an_ipu_lets_its_holder_give_it_back(monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    monkeypatch.setattr(weights, "_POLL_SECONDS", 0.02)
    layer, executors, x = Layer(), [], torch.ones(2, 4)
    for _ in range(2):  # on the same tensors
        net = Layer(layer)
        options = poptorch.Options().showCompilationProgressBar(False).useIpuId(0)
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        executors.append(poptorch.trainingModel(net, options, optimizer))
    executors[0](x)
    results = []
    thread = threading.Thread(target=lambda: results.append(executors[1](x)), daemon=True)
    thread.start()
    time.sleep(0.2)
    assert not results
    executors[0].detachFromDevice()
    thread.join(60)
    assert len(results) == 1
    executors[1].destroy()
