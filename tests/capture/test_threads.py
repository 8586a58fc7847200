"""Check that tracing in one thread leaves other threads, and forked processes, as they were."""

import logging
import os
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

from ipu_dynamo import compile_inference, compile_training, identity_loss
from ipu_dynamo.capture.private.tracing import DATA_DEPENDENT, outside_modes
from ipu_dynamo.ops.private.locks import compile_lock, fork_safe_lock
from ipu_dynamo.ops.private.replacing import TrueInThisThread, in_this_thread, replaced
from ipu_dynamo.testing import assert_same_training

EAGER = {"engine": "eager"}
FAKE_TENSORS = "torch._subclasses.fake_tensor"


def in_another_thread(work):
    """What `work` returns, or the exception that it raises, in a thread of its own."""
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


class Meanwhile(nn.Module):
    """A linear layer; while it is traced, `work` runs in another thread."""

    def __init__(self, work):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.work, self.results = work, []

    def forward(self, x):
        self.results.append(in_another_thread(self.work))
        return self.layer(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def gradients():
    """Of a backward pass, of `autograd.grad`, and of a function with a backward of its own."""
    x = torch.ones(3, requires_grad=True)
    (x * 3).sum().backward()
    (second,) = torch.autograd.grad((x * 5).sum(), x)
    third = torch.ones(3, requires_grad=True)
    Doubled.apply(third).sum().backward()
    return [t.tolist() for t in (x.grad, second, third.grad)]


def hooked_gradient():
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 7)
    x.sum().backward()
    return x.grad.tolist()


def adam_step():
    """A weight after a step: where PyTorch believes that it compiles it computes otherwise."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return weight.tolist(), type(optimizer.state[weight]["step"])


@torch.compile(backend="eager")
def compiled(x):
    return x + 1


def call_compiled():
    return compiled(torch.ones(2)).tolist()


def compiling():
    return bool(torch.compiler.is_compiling())


def causal_attention():
    """Whether a layer finds out that its mask is a causal one."""
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return torch.nn.modules.transformer._detect_is_causal_mask(mask, None, 4)


def logged():
    """How often a message about fake tensors is passed on."""
    logger, handler, records = logging.getLogger(FAKE_TENSORS), logging.Handler(), []
    handler.emit = records.append
    logger.addHandler(handler)
    logger.error("message")
    logger.removeHandler(handler)
    return len(records)


def modes_left():
    """How many modes a thread leaves that computes outside of all."""
    with outside_modes() as modes:
        return len(modes)


@pytest.mark.parametrize(
    "work",
    [
        gradients,
        hooked_gradient,
        adam_step,
        call_compiled,
        compiling,
        causal_attention,
        logged,
        modes_left,
    ],
    ids=lambda work: work.__name__,
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_other_threads_compute_as_ever_while_one_traces(work, training):
    expected = work()
    model = Meanwhile(work)
    if training:
        loss = nn.Sequential(model, Loss())
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        compile_training(loss, optimizer, EAGER)(torch.ones(2, 3))
    else:
        compile_inference(model, EAGER)(torch.ones(2, 3))
    assert [repr(result) for result in model.results] == [repr(expected)]


def test_other_threads_find_the_tensors_of_a_model_while_one_traces_it():
    model, x = Meanwhile(lambda: look()), torch.ones(4, 3)
    whole = nn.Sequential(model, nn.BatchNorm1d(2), Loss())
    layer = compile_inference(model.layer, EAGER)

    def look():
        state = whole.state_dict()
        own = [model.layer.weight, whole[1].running_mean, *whole.parameters(), *whole.buffers()]
        return own, [value.clone() for value in state.values()], layer(x)

    own, state, result = look()
    compile_training(whole, torch.optim.SGD(whole.parameters(), lr=0.1), EAGER).compile(x)
    (found,) = model.results
    assert all(a is b for a, b in zip(own, found[0], strict=True))
    assert all(map(torch.equal, [*state, result], [*found[1], found[2]]))


def test_other_threads_call_what_is_compiled_while_one_differentiates():
    results, expected = [], call_compiled()

    class ForwardMeanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # runs when the graph is differentiated, too
            results.append(in_another_thread(call_compiled))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss(x):
        return identity_loss(ForwardMeanwhile.apply(x), "mean")

    model = nn.Sequential(nn.Linear(3, 2), Applied(loss))
    compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)(torch.ones(2, 3))
    assert len(results) > 1
    assert all(result == expected for result in results), results


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Loss(nn.Module):
    def forward(self, x):
        return identity_loss(x.square(), "mean")


class Asking(nn.Module):
    """Branches as libraries do."""

    def forward(self, x):
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_compiling() == True  # noqa: E712
        return x + 1


def test_the_thread_that_traces_is_seen_as_compiling():
    assert compile_inference(Asking(), EAGER)(torch.ones(2)).tolist() == [2, 2]
    assert torch.compiler.is_compiling() is False


def linear_with_loss():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), Loss())


def trained(model, x):
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    return [step(x).item() for _ in range(2)]


def captured(model, x):
    loss = torch.compile(model, backend="ipu", options=EAGER)(x)
    loss.backward()
    return loss.item()


def test_models_are_compiled_in_several_threads_at_once():
    x = torch.randn(6, 4)
    expected = [work(linear_with_loss(), x) for work in (trained, captured)]
    torch._dynamo.reset()
    start = threading.Barrier(4)
    results = []

    def run(work, model):
        start.wait()
        try:
            results.append(work(model, x))
        except BaseException as error:
            results.append(error)

    each = [(work, linear_with_loss()) for work in (trained, captured) * 2]
    threads = [threading.Thread(target=run, args=one) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(repr, results)) == sorted(map(repr, expected * 2))
    assert len(gradients()) == 3  # nothing that was replaced stays
    assert_same_training(linear_with_loss(), [(x,)], EAGER)


def test_a_failed_trace_in_a_thread_leaves_nothing_replaced():
    def failing(x):
        return x if x.sum() > 0 else -x

    error = in_another_thread(lambda: compile_inference(failing, EAGER)(torch.ones(2)))
    assert isinstance(error.__cause__, DATA_DEPENDENT)
    assert torch.compiler.is_compiling() is False
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert len(gradients()) == 3
    assert compile_lock().acquire(blocking=False)
    compile_lock().release()


def test_an_inherited_attribute_is_shown_again():
    class Base:
        name = "base"

    class Derived(Base):
        pass

    with replaced(Derived, "name", "other"):
        assert Derived.name == "other"
    assert Derived.name == "base"
    assert "name" not in vars(Derived)


@pytest.mark.parametrize("inherited", [False, True])
def test_a_patcher_that_ends_after_ours_gets_the_original_back(inherited):
    class Base:
        def text(self):
            return "base"

    class Derived(Base):
        if not inherited:
            text = Base.text

    before = Derived.text
    other = mock.patch.object(Derived, "text", return_value="other")
    ours = in_this_thread(lambda self: "ours", before)
    with replaced(Derived, "text", ours):
        assert Derived().text() == Derived.text(Derived()) == "ours"
        assert other.get_original()[0] is Derived.text
        other.start()
    assert Derived().text() == "other"
    other.stop()
    assert ours(Derived()) == Derived().text() == "base"
    assert Derived.text is before


def test_what_another_patcher_put_back_meanwhile_stays():
    module = types.SimpleNamespace(name="first")
    other = mock.patch.object(module, "name", "other")
    other.start()
    with replaced(module, "name", "ours"):
        other.stop()
    assert module.name == "first"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("make", [compile_lock, fork_safe_lock])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_process(make):
    lock = make()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=1) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_a_compiling_thread_forks_still_holds_the_lock():
    with compile_lock():
        child = os.fork()
        if child == 0:
            taken = in_another_thread(lambda: compile_lock().acquire(blocking=False))
            compile_lock().release()
            os._exit(int(taken))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_flag_of_compiling_reckons_like_a_bool():
    here = TrueInThisThread()
    flag = False
    flag |= here  # as libraries do
    assert flag is True
    assert (here & False, here | False, here ^ True, False | here) == (False, True, False, True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: here | False).result() is False
