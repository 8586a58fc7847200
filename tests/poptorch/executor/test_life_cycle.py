"""Check wrapping, weights on both sides, and what happens after a failure."""

import copy
import gc
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import poptorch
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from tests.poptorch.executor.models import Classifier, Weighted, batch

ONE = torch.ones(1)


def trainer(model):
    return poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))


def test_touching_a_weight_fetches_it_once(monkeypatch):
    model = Weighted()
    executor = trainer(model)
    fetched, read = [], CompiledModel.read_weights
    monkeypatch.setattr(
        CompiledModel, "read_weights", lambda *args: (fetched.append(1), read(*args))
    )
    weight = model.w
    for _ in range(3):
        executor(ONE)
    assert not fetched
    assert weight == -2
    assert model.state_dict()["w"] == -2
    assert len(fetched) == 1


@pytest.mark.parametrize(
    "look",
    [
        lambda m: next(iter(m.parameters())).detach(),
        lambda m: m.state_dict()["w"],
        lambda m: m(ONE).detach(),
        lambda m: torch.stack([m.w])[0].detach(),
        lambda m: copy.deepcopy(m).w.detach(),
        lambda m: pickle.loads(pickle.dumps(m)).w.detach(),
    ],
)
def test_every_way_to_look_sees_trained_weights(look):
    model = Weighted()
    executor = trainer(model)
    executor(ONE)
    assert float(look(model)) == 0
    assert not executor.copyWeightsToHostIfNeeded()


def test_host_changes_need_an_upload():
    model = Weighted()
    executor = poptorch.inferenceModel(model)
    assert executor(ONE) == 1
    with torch.no_grad():
        model.w.fill_(5)
    assert executor(ONE) == 1
    executor.copyWeightsToDevice()
    assert executor(ONE) == 5
    executor.load_state_dict({"w": torch.tensor([7.0])})
    assert executor(ONE) == 7


def test_inference_follows_training():
    model = Weighted()
    executor = trainer(model)
    follower, also = poptorch.inferenceModel(model), poptorch.inferenceModel(executor)
    for expected in (0, -1):
        executor(ONE)
        assert follower(ONE) == also(ONE) == expected


def test_classes_change_and_come_back():
    model = Classifier()
    executor = trainer(model)
    assert type(model).__name__ == "PoptorchClassifier"
    assert isinstance(model, Classifier)
    assert type(model.first.weight) is executor.PoptorchParameter
    assert isinstance(model.first.weight, nn.Parameter)
    assert repr(model.first.weight) == repr(nn.Parameter(model.first.weight.detach()))
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.first.weight is not model.first.weight
    assert type(pickle.loads(pickle.dumps(model))) is Classifier
    assert executor.model is model
    executor(*batch(2))
    model.destroy()
    assert type(model) is Classifier
    assert type(model.first.weight) is nn.Parameter
    assert not executor.isCompiled()


def test_one_training_wrapper_at_a_time():
    model = Weighted()
    executor = trainer(model)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        trainer(model)
    executor.destroy()
    again = trainer(model)
    again(ONE)
    assert model.w == 0


def test_a_destroyed_executor_compiles_again():
    executor = trainer(Weighted())
    executor(ONE)
    executor.destroy()
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        executor.copyWeightsToHost()
    executor(torch.ones(2))
    assert executor.model.w == -2


def test_buffers_change_on_the_device():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n += x
            return self.n

    model = Counter()
    executor = poptorch.inferenceModel(model)
    assert [float(executor(ONE)) for _ in range(3)] == [1, 2, 3]
    assert model.n == 0
    executor.copyWeightsToHost()
    assert model.n == 3


def test_parameters_change_on_the_device_in_an_inference():
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([8.0]))

        def forward(self, x):
            with torch.no_grad():
                self.weight.div_(2)
            return poptorch.identity_loss(self.weight * x, "none")

    model = Bounded()
    executor = poptorch.inferenceModel(model)
    assert [float(executor(ONE)) for _ in range(3)] == [4, 2, 1]
    executor.copyWeightsToHost()
    assert model.weight == 1
    with pytest.raises(poptorch.Error, match="which the optimiser updates"):
        poptorch.trainingModel(Bounded()).compile(ONE)


def test_attaching():
    executor = poptorch.inferenceModel(Weighted())
    with pytest.raises(poptorch.Error, match="not been compiled"):
        executor.detachFromDevice()
    executor.compile(ONE)
    with pytest.raises(poptorch.Error, match="already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        executor.detachFromDevice()
    assert not executor.isAttachedToDevice()
    assert executor(ONE) == 1
    assert executor.isAttachedToDevice()


def test_ipus_with_a_number_are_had_in_turn():
    options = poptorch.Options().useIpuId(1)
    first, second = (poptorch.inferenceModel(Weighted(), options) for _ in range(2))
    first(ONE)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        second(ONE)
    first.detachFromDevice()
    second(ONE)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        first(ONE)
    second.destroy()
    assert first(ONE) == 1


def test_an_offline_device_only_compiles():
    options = poptorch.Options().connectionType(poptorch.ConnectionType.Never)
    executor = poptorch.inferenceModel(Weighted(), options)
    executor.compile(ONE)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        executor(ONE)


def test_a_model_that_raises_is_left_as_it_was():
    class Fails(Weighted):
        broken = True

        def forward(self, x):
            if Fails.broken:
                raise KeyError("mine")
            return super().forward(x)

    model = Fails()
    executor = trainer(model)
    with pytest.raises(KeyError, match="mine"):
        executor(ONE)
    assert not executor.isCompiled()
    assert not poptorch.isRunningOnIpu()
    Fails.broken = False
    executor(ONE)
    assert model.w == 0


def test_outputs_cannot_be_differentiated():
    loss = trainer(Weighted())(ONE)
    assert type(loss) is torch.Tensor
    assert loss.grad_fn is None
    with pytest.raises(poptorch.Error, match=r"^'poptorch_py_error': backward\(\) cannot"):
        loss.backward()


def test_modules_show_their_blocks(capsys):
    model = Classifier(second=1)
    text = repr(poptorch.inferenceModel(model))
    assert "(second): BeginBlock(user_id=second, ipu_id=1) Linear(in_features=8" in text
    assert text.replace("BeginBlock(user_id=second, ipu_id=1) ", "").replace(
        "BeginBlock(user_id=first, ipu_id=0) ", ""
    ) == repr(model)
    poptorch.print(model)
    assert capsys.readouterr().out == f"{text}\n{model!r}\n"


def test_compile_hooks_run_in_order_also_around_failures():
    calls = []
    handles = [
        poptorch.registerPreCompileHook(lambda: calls.append("before")),
        poptorch.registerPostCompileHook(lambda: calls.append("after")),
    ]
    executor = poptorch.inferenceModel(lambda x: calls.append("trace") or x)
    executor(ONE)
    executor(ONE)
    with pytest.raises(RuntimeError):
        poptorch.inferenceModel(lambda x: x @ torch.ones(2, 2))(ONE)
    for handle in handles:
        handle.remove()
    executor.destroy()
    executor(ONE)
    assert calls == ["before", "trace", "after", "before", "after", "trace"]
    running = []
    handle = poptorch.registerPreCompileHook(lambda: running.append(poptorch.isRunningOnIpu()))
    poptorch.inferenceModel(lambda x: x + 1)(ONE)
    handle.remove()
    assert running == [True]
    with pytest.raises(RuntimeError, match="Pre-compile hook must be callable"):
        poptorch.registerPreCompileHook(None)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error:the tensor")  # of a constant that the trace has recorded
@pytest.mark.parametrize("optimizer", [poptorch.optim.SGD, poptorch.optim.AdamW])
def test_an_executor_that_is_freed_while_another_model_is_traced_brings_its_weights_home(optimizer):
    trained = Weighted()
    held = [poptorch.trainingModel(trained, None, optimizer(trained.parameters(), lr=1.0))]
    held[0](ONE)
    held[0].itself = held[0]  # a cycle, which only the garbage collector finds

    class Freeing(nn.Module):
        def forward(self, x):
            held.clear()
            gc.collect()
            return x + 1

    raised = []
    hook, sys.unraisablehook = sys.unraisablehook, raised.append
    try:
        traced = poptorch.inferenceModel(Freeing())
        assert traced(ONE) == 2
    finally:
        sys.unraisablehook = hook
    assert not raised
    (function,) = traced._executable.program.functions
    assert [str(node.target) for node in function.operators] == ["aten.add.Tensor"]
    assert trained.w != Weighted().w


def test_freeing_an_executor_calls_no_mode_of_a_trace_that_has_not_begun(monkeypatch):
    """A trace before autograd would record even that gradients are switched off."""
    raised, seen = [], []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    class Unready(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            raise AttributeError("no graph yet")

    model = Weighted()
    trained = poptorch.trainingModel(model)
    trained(ONE)
    with Unready():
        del trained
        gc.collect()
    assert not raised
    assert not seen
    assert model.w != Weighted().w


def test_ipus_on_demand_are_reserved_after_compiling():
    def options(kind):
        return poptorch.Options().useIpuId(7).connectionType(kind)

    first = poptorch.inferenceModel(Weighted(), options(poptorch.ConnectionType.Always))
    second = poptorch.inferenceModel(Weighted(), options(poptorch.ConnectionType.OnDemand))
    first(ONE)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        second(ONE)
    assert (second.isCompiled(), second.isAttachedToDevice()) == (True, False)
    program = second._executable.program
    first.detachFromDevice()
    assert second(ONE) == 1
    assert second._executable.program is program
    second.destroy()
    second.compile(ONE)
    assert second.isAttachedToDevice()


def test_named_buffers_need_the_option_and_an_empty_list_uploads_none():
    executor = poptorch.inferenceModel(nn.BatchNorm1d(2).eval())
    executor.compile(torch.ones(2, 2))
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable via updatable"):
        executor.copyNamedBuffersToDevice()
    options = poptorch.Options()
    options.updatableNamedBuffers([])
    model = nn.BatchNorm1d(2).eval()
    executor = poptorch.inferenceModel(model, options)
    before = executor(torch.ones(2, 2))
    model.running_mean.fill_(5.0)
    executor.copyNamedBuffersToDevice()
    assert torch.equal(executor(torch.ones(2, 2)), before)
