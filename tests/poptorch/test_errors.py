"""Check PopTorch's errors, and that none of the core's gets out."""

import copy
import pickle

import pytest

import poptorch
from ipu_dynamo.errors import CompileError, IpuError
from poptorch.errors import require, wrapped

CLASSES = [poptorch.Error, poptorch.RecoverableError, poptorch.UnrecoverableError]


@pytest.mark.parametrize("error", CLASSES)
def test_classes_are_found_in_poptorch_core(error):
    assert getattr(poptorch.poptorch_core, error.__name__) is error
    assert error.__module__ == "poptorch.poptorch_core"


@pytest.mark.parametrize("error", CLASSES)
def test_no_error_is_a_runtime_error(error):
    assert issubclass(error, Exception)
    assert not issubclass(error, RuntimeError)


def test_create_builds_an_error_of_the_python_layer():
    error = poptorch.createPoptorchError("no loss found")
    assert (error.type, error.message, error.location) == ("poptorch_py_error", "no loss found", "")
    assert str(error) == "'poptorch_py_error': no loss found"


@pytest.mark.parametrize("twin", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_can_be_copied(twin):
    error = poptorch.RecoverableError(
        "link", type="poplar_x", location="compiling", recovery_action="LINK_RESET"
    )
    again = twin(error)
    assert type(again) is poptorch.RecoverableError
    assert str(again) == str(error)
    assert again.recovery_action == "LINK_RESET"


def test_wrapped_turns_a_core_error_into_poptorchs():
    original = CompileError("no loss", where="model.py:3 in forward: return x", hint="return one")
    original.add_note("in pass identity_loss")
    with (
        pytest.raises(poptorch.Error, match=r"no loss\n  from: model.py:3") as caught,
        wrapped("compiling Net"),
    ):
        raise original
    assert caught.value.__cause__ is original
    assert caught.value.message == str(original)
    assert caught.value.type == "poptorch_py_error"
    assert caught.value.location == "in pass identity_loss\ncompiling Net"
    assert caught.value.location in str(caught.value)


def test_wrapped_contexts_stack_from_the_inside():
    with pytest.raises(poptorch.Error) as caught, wrapped("outer"), wrapped(), wrapped("inner"):
        raise IpuError("it broke")
    assert caught.value.location == "inner\nouter"


def test_wrapped_leaves_other_errors_alone():
    with pytest.raises(AssertionError, match="plain"), wrapped("compiling"):
        require(False, "plain")


def test_wrapped_is_a_decorator():
    @wrapped("running")
    def run(value):
        if value < 0:
            raise IpuError("negative")
        return value

    assert run(3) == 3
    with pytest.raises(poptorch.Error, match="negative"):
        run(-1)


@pytest.mark.parametrize("kind", poptorch.poptorch_core.TestErrorType)
def test_every_kind_of_test_error_can_be_thrown(kind):
    with pytest.raises(poptorch.Error, match=kind.name) as caught:
        poptorch.poptorch_core._throwTestError(kind)
    if kind.name == "PoplarRecoverableFullReset":
        assert isinstance(caught.value, poptorch.RecoverableError)
        assert caught.value.recovery_action == "FULL_RESET"
    is_final = isinstance(caught.value, poptorch.UnrecoverableError)
    assert is_final == (kind.name == "PoplarUnrecoverable")
