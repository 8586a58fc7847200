"""Check what an extended model refuses before any step, by name and with the way out."""

import keras
import pytest

from ipu_dynamo.keras import extend
from ipu_dynamo.keras.attach.refusals import check_execution

METHODS = ["train_step", "make_train_function", "make_test_function", "make_predict_function"]
PIPELINED = ["test_step", "predict_step", "call"]


def chain(**methods):
    cls = type("Mine", (keras.Sequential,), methods)
    model = extend(cls([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
    return model


def override(self, *args, **kwargs):
    raise AssertionError("never called")


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_run_eagerly_is_refused(kind):
    model = chain()
    check_execution(model, kind)
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match=rf"{kind} of model .* run_eagerly is True: set it to"):
        check_execution(model, kind)


@pytest.mark.parametrize("method", METHODS)
def test_an_override_that_a_program_replaces_is_refused(method):
    with pytest.raises(
        RuntimeError, match=rf"Mine of model mine\w* overrides {method}.*enable_keras_extensions"
    ):
        check_execution(chain(**{method: override}), "fit")


@pytest.mark.parametrize("method", PIPELINED)
def test_further_overrides_are_refused_in_a_pipeline(method):
    model = chain(**{method: override if method != "call" else keras.Sequential.call})
    check_execution(model, "predict")
    model.set_pipeline_stage_assignment([0, 1])
    with pytest.raises(RuntimeError, match=rf"overrides {method}"):
        check_execution(model, "predict")


def test_a_call_inside_a_pipelined_model_is_not_left_out():
    cls = type("Mine", (keras.Sequential,), {"call": keras.Sequential.call})
    inner = cls([keras.Input((3,)), keras.layers.Dense(3)], name="inner")
    model = extend(keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
    check_execution(model, "fit")
    model.set_pipeline_stage_assignment([0, 1])
    with pytest.raises(RuntimeError, match="class Mine of model inner overrides call"):
        check_execution(model, "fit")


def test_a_subclass_without_call_is_refused():
    model = extend(type("Empty", (keras.Model,), {})())
    model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match=r"class Empty of model empty\w* has no call"):
        check_execution(model, "fit")
