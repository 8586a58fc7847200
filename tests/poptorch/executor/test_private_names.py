"""Check the private names of executors and modules that libraries for PopTorch use."""

import copy
import importlib
import pickle
import runpy

import pytest
import torch

import poptorch
from poptorch import _impl, _poplar_executor, _utils
from poptorch._args_parser import ArgsParser
from tests.poptorch.executor.models import Classifier, Weighted, batch


def trained():
    model = Weighted()
    executor = poptorch.trainingModel(model)
    executor(torch.ones(1))
    return model, executor


def test_an_unwrapped_model_is_the_users_and_fetches_nothing():
    model, executor = trained()
    before = type(model), type(model.w)
    assert torch.equal(model.w.detach(), torch.tensor([0.99]))
    _impl.unwrapModelIfNecessary(model)
    assert (type(model), type(model.w)) == (Weighted, torch.nn.Parameter)
    executor(torch.ones(1))
    assert torch.equal(model.w.detach(), torch.tensor([0.99]))
    assert (executor.isCompiled(), executor.isAttachedToDevice()) == (True, True)
    _impl.rewrapModelIfNecessary(model)
    assert (type(model), type(model.w)) == before
    torch.testing.assert_close(model.w.detach(), torch.tensor([0.98]))


def test_a_parameter_that_came_while_unwrapped_stays_plain():
    model, _ = trained()
    _impl.unwrapModelIfNecessary(model)
    model.v = torch.nn.Parameter(torch.ones(1))
    _impl.rewrapModelIfNecessary(model)
    assert type(model.v) is torch.nn.Parameter
    assert _impl.isWrapped(model.w)


def test_one_object_gets_its_wrapper_back():
    model, _ = trained()
    wrapper = type(model)
    _impl.unwrapIfWrapped(model)
    twin = copy.copy(model)
    assert _impl._restoreWrapperIfNecessary(twin) is twin
    assert type(twin) is Weighted
    assert type(_impl._restoreWrapperIfNecessary(model)) is wrapper


def test_a_model_destroyed_while_unwrapped_stays_plain():
    model, executor = trained()
    _impl.unwrapModelIfNecessary(model)
    executor.destroy()
    _impl.rewrapModelIfNecessary(model)
    assert (type(model), type(model.w)) == (Weighted, torch.nn.Parameter)
    assert torch.equal(model.w.detach(), torch.tensor([0.99]))


def test_what_is_not_wrapped_stays_as_it_is():
    model = Weighted()
    _impl.unwrapModelIfNecessary(model)
    _impl.rewrapModelIfNecessary(model)
    assert (type(model), type(model.w)) == (Weighted, torch.nn.Parameter)


def test_executors_are_of_one_class_however_it_is_reached():
    assert _poplar_executor.PoplarExecutor is poptorch.PoplarExecutor
    again = runpy.run_path(importlib.util.find_spec("poptorch._poplar_executor").origin)
    assert again["PoplarExecutor"] is poptorch.PoplarExecutor
    assert again["_OverwriteContextManager"] is _poplar_executor._OverwriteContextManager


def test_batches_are_concatenated_position_by_position():
    batches = [(torch.full((n, 2), n), torch.full((n,), -n)) for n in (1, 3)]
    first, second = _utils.combine_batch_tensors_gen(batches)
    assert torch.equal(first, torch.tensor([[1, 1], [3, 3], [3, 3], [3, 3]]))
    assert torch.equal(second, torch.tensor([-1, -3, -3, -3]))


@pytest.mark.parametrize("fails", [False, True])
def test_a_library_replaces_functions_during_the_trace(monkeypatch, fails):
    monkeypatch.setattr("poptorch.substitutions._kinds", [])
    calls = []

    def manager(name):
        class Manager:
            def replace(self):
                calls.append((name, "replace", poptorch.isRunningOnIpu()))

            def restore(self):
                calls.append((name, "restore", poptorch.isRunningOnIpu()))

        return Manager

    first, second = manager("first"), manager("second")
    for kind in (first, second, first):
        _poplar_executor._OverwriteContextManager.registerSubsitutionManager(kind)

    def forward(x):
        calls.append("forward")
        if fails:
            raise KeyError("mine")
        return x + 1

    executor = poptorch.inferenceModel(forward)
    for _ in range(2):
        if fails:
            with pytest.raises(KeyError):
                executor(torch.ones(1))
        else:
            executor(torch.ones(1))
    once = [
        ("first", "replace", True),
        ("second", "replace", True),
        "forward",
        ("second", "restore", True),
        ("first", "restore", True),
    ]
    assert calls == once * (2 if fails else 1)


def test_the_executable_is_there_while_there_is_a_program():
    executor = poptorch.inferenceModel(Classifier())
    assert executor._executable is None
    assert executor._executable_inputs is None
    executor(batch(2)[0])
    assert executor._executable
    assert repr(executor._executable) == (
        "<executable of Classifier: inference on 1 virtual IPU, 1 replica>"
    )
    executor.destroy()
    assert executor._executable is None


def test_the_inputs_of_the_compilation_stay_after_it():
    def forward(a, b=2, *rest, c=None, **more):
        return a + b + rest[0] + more["d"]

    one = torch.ones(4, 2)
    options = poptorch.Options().deviceIterations(2)
    executor = poptorch.inferenceModel(forward, options)
    executor(one, 3, one, c="c", d=one)
    executor.destroy()
    inputs = executor._executable_inputs
    assert inputs.args[0] is one
    assert inputs.args[1:] == [3, one]
    assert inputs.arg_names == ["a", "b"]
    assert inputs.kwargs == {"c": "c", "d": one}
    executor(one, 3, one, c=None, d=torch.ones(2, 2).repeat(2, 1))
    assert executor._executable_inputs.kwargs["c"] is None


def test_executors_name_their_models_and_optimizer():
    model = Weighted()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training, inference = (
        poptorch.trainingModel(model, None, optimizer),
        poptorch.inferenceModel(model),
    )
    assert training._user_model is model
    assert training._model is not model
    assert inference._user_model is inference._model is inference.model
    assert training._optimizer is optimizer
    assert inference._optimizer is None
    assert training._options is training.options


def test_any_other_name_is_looked_up_on_the_model():
    with pytest.raises(AttributeError, match="'Weighted' object has no attribute 'wrong'"):
        _ = poptorch.inferenceModel(Weighted()).wrong


class Counting(Weighted):
    """A model with methods of the names that wrapping needs."""

    reads = 0

    def __getattribute__(self, name):
        if name == "w":
            Counting.reads += 1
        return super().__getattribute__(name)

    def __reduce_ex__(self, protocol):
        made, arguments, state, *rest = super().__reduce_ex__(protocol)
        return made, arguments, {**state, "pickled": True}, *rest


def test_the_first_base_of_a_wrapped_class_is_the_users():
    model = Counting()
    executor = poptorch.trainingModel(model)
    assert type(model).__bases__[0] is Counting
    assert type(model).__name__ == "PoptorchCounting"
    executor(torch.ones(1))
    reads = Counting.reads
    torch.testing.assert_close(model.w.detach(), torch.tensor([0.99]))
    assert Counting.reads == reads + 1
    assert copy.copy(model).pickled
    assert copy.deepcopy(model).pickled
    assert type(copy.copy(model)) is type(model)
    twin = pickle.loads(pickle.dumps(model))
    assert (type(twin), twin.pickled) == (Counting, True)
    model.destroy()
    assert type(model) is Counting


def test_the_tensors_of_a_trace_have_numbers_of_their_own():
    seen = []

    def model(x):
        y = x + 1
        seen.extend([poptorch.getIpuTensorId(t) for t in (x, y, x, x * 2, y)])
        return y

    poptorch.inferenceModel(model)(torch.ones(2))
    x, y, again, other, also = seen
    assert x == again
    assert y == also
    assert len({x, y, other}) == 3
    for tensor in (torch.ones(1), "no tensor"):
        with pytest.raises(poptorch.Error, match="You may only call getIpuTensorId on an IPU"):
            poptorch.getIpuTensorId(tensor)


def test_a_program_makes_executors_of_a_class_of_its_own():
    class Counting(poptorch.PoplarExecutor):
        def __init__(self, model, **settings):
            super().__init__(model, poptorch_version=poptorch.__version__, **settings)
            self.calls = 0

        def __call__(self, *args):
            self.calls += 1
            return super().__call__(*args)

        def detachFromDevice(self):  # noqa: N802 (PopTorch's name)
            if self._is_attached:
                super().detachFromDevice()

    model, options = Weighted(), poptorch.Options()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Counting(
        copy.copy(model), options=options, training=True, optimizer=sgd, user_model=model
    )
    training(torch.ones(1))
    for _ in range(2):
        training.detachFromDevice()
    assert training.options.output_mode == poptorch.OutputMode.Final
    assert options.defaultOutputMode()
    inference = Counting(copy.copy(model), options=None, training=False)
    plain = poptorch.inferenceModel(model)
    assert torch.equal(inference(torch.ones(1)), plain(torch.ones(1)))
    assert (training.calls, inference.calls) == (1, 1)


def test_names_of_old_programs_are_there():
    call = ArgsParser(Weighted())((torch.ones(1),), {})
    assert [name for name, _ in call.leaves()] == ["x"]
    assert isinstance(poptorch.PipelinedExecution(), poptorch.options._IExecutionStrategy)
