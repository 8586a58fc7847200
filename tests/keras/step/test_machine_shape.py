"""Check shapes of the machine, and what is refused before any step."""

from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.step.machine_shape import (
    CallShape,
    call_shape,
    micro_batches_needed,
    replica_count,
    stages_as_run,
)

L = keras.layers
X = np.zeros((8, 4), "float32")
Y = np.zeros((8, 3), "float32")


def make(optimizer: Any = "sgd", *, stages: Any = None, steps: int = 8, **options: Any) -> Any:
    """Four layers, on these stages."""
    model = keras.Sequential(
        [keras.Input((4,)), L.Dense(3, name="a"), L.Dense(3), L.Dense(3), L.Dense(3)], name="m"
    )
    model.compile(optimizer, "mse", steps_per_execution=steps)
    if stages is not None:
        model.set_pipeline_stage_assignment(stages)
        model.set_pipelining_options(**options)
    return model


@pytest.mark.parametrize(
    ("ipus", "count"),
    [((0, 1), 2), ((1, 0), 3), ((0, 1, 1, 0), 3), ((0,), 1), ((0, 0), 1), ((1, 1), 2)],
)
def test_neighbours_on_one_ipu_are_one_stage(ipus, count):
    assert stages_as_run(ipus) == count


@pytest.mark.parametrize(
    ("num_ipus", "stages", "mapping", "replicas"),
    [(1, None, None, 1), (4, None, None, 4), (4, [0, 0, 1, 1], None, 2), (8, [0, 1, 2, 2], None, 2),
     (4, [0, 1, 2, 2], [0, 1, 0], 2), (4, [0, 0, 1, 1], [0, 2], 1)],
)  # fmt: skip
def test_replicas_are_what_the_ipus_make(num_ipus, stages, mapping, replicas):
    with IPUStrategy(num_ipus=num_ipus).scope():
        assert replica_count(make(stages=stages, device_mapping=mapping)) == replicas


@pytest.mark.parametrize(
    ("num_ipus", "words"), [(1, "multiple of 4.* 1"), (6, r"6 IPUs.* 4 .*num_ipus=8")]
)
def test_too_few_ipus_and_no_multiple_are_refused(num_ipus, words):
    with IPUStrategy(num_ipus=num_ipus).scope(), pytest.raises(ValueError, match=words):
        replica_count(make(stages=[0, 1, 2, 2]))


def test_a_mapping_of_another_length_is_refused():
    with IPUStrategy(num_ipus=2).scope(), pytest.raises(ValueError, match=r"3 entries.* 2 "):
        replica_count(make(stages=[0, 0, 1, 1], device_mapping=[0, 1, 1]))


def test_an_empty_stage_is_refused():
    with IPUStrategy(num_ipus=4).scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, L.Dense(2)(L.Dense(2)(inputs)))
        model.compile("sgd", "mse")
        elements = model.get_pipeline_stage_assignment()
        elements[0].pipeline_stage, elements[1].pipeline_stage = 0, 2
        model.set_pipeline_stage_assignment(elements)
        with pytest.raises(RuntimeError, match=r"\[1\]"):
            call_shape(model, "predict", 8)


def test_shapes_count_steps_and_updates():
    with IPUStrategy(num_ipus=4).scope():
        model = make(stages=[0, 0, 1, 1], gradient_accumulation_steps_per_replica=4)
        assert call_shape(model, "fit", 8) == CallShape(8, 4, 2, True)
        assert call_shape(model, "predict", 8) == CallShape(8, 1, 2, True)
        model = make()
        model.set_gradient_accumulation_options(2)
        assert call_shape(model, "fit", 8) == CallShape(8, 2, 4, False)
        assert micro_batches_needed(model, "fit") == 2
        assert micro_batches_needed(model, "predict") == 1


def test_accumulation_that_is_unset_in_a_pipeline_is_refused():
    with IPUStrategy(num_ipus=2).scope():
        model = make(stages=[0, 0, 1, 1])
        with pytest.raises(ValueError, match=r"set_pipelining_options.*3"):
            call_shape(model, "fit", 8)
        model.set_pipelining_options(pipeline_schedule="sequential")
        assert call_shape(model, "fit", 8) == CallShape(8, 1, 1, True)


@pytest.mark.parametrize("pipelined", [False, True])
def test_steps_that_do_not_divide_are_refused(pipelined):
    with IPUStrategy(num_ipus=2).scope():
        model = make(stages=[0, 0, 1, 1] if pipelined else None)
        model.set_pipelining_options(3) if pipelined else model.set_gradient_accumulation_options(3)
        with pytest.raises(
            RuntimeError, match=r"pipelined.* 8 .* 3 " if pipelined else r" 8 .* 3 "
        ):
            call_shape(model, "fit", 8)


@pytest.mark.parametrize(
    ("kind", "given", "least"), [("fit", 2, 3), ("evaluate", 1, 2), ("predict", 1, 2)]
)
def test_too_few_micro_batches_for_a_pipeline_are_refused(kind, given, least):
    with IPUStrategy(num_ipus=2).scope():
        model = make(stages=[0, 0, 1, 1], gradient_accumulation_steps_per_replica=2)
        with pytest.raises(ValueError, match=rf"{kind}.*2 stages.*{least}.*has {given}"):
            call_shape(model, kind, given)


def test_the_least_number_of_micro_batches_runs():
    with IPUStrategy(num_ipus=2).scope():
        model = make(stages=[0, 0, 1, 1], gradient_accumulation_steps_per_replica=5,
                     device_mapping=[1, 0], steps=5)  # fmt: skip
        assert micro_batches_needed(model, "predict") == 3
        model.fit(np.zeros((5, 4)), np.zeros((5, 3)), batch_size=1, verbose=0)
        model.steps_per_execution = 3
        model.predict(np.zeros((3, 4)), batch_size=1, verbose=0)


def test_a_variable_on_two_ipus_is_refused_and_on_one_it_is_not():
    with IPUStrategy(num_ipus=2).scope():
        inputs, shared = keras.Input((4,)), L.Dense(4, name="shared")
        model = keras.Model(inputs, L.Dense(3)(shared(shared(inputs))))
        model.compile("sgd", "mse", steps_per_execution=6)
        elements = model.get_pipeline_stage_assignment()
        for element, stage in zip(elements, (0, 1, 1), strict=True):
            element.pipeline_stage = stage
        model.set_pipeline_stage_assignment(elements)
        model.set_pipelining_options(3)
        message = r"shared.*can only be used by pipeline stages on the same IPU.*\[0, 1\]"
        with pytest.raises(ValueError, match=message):
            model.fit(X[:6], Y[:6], batch_size=1, verbose=0)
        model.set_pipelining_options(device_mapping=[0, 0])
        model.fit(X[:6], Y[:6], batch_size=1, verbose=0)


class Minimizing(keras.optimizers.SGD):
    def minimize(self, loss, variables):
        raise NotImplementedError


def test_optimizers_that_cannot_are_refused():
    with IPUStrategy().scope():
        for optimizer, words in (
            (Minimizing(), "must not override"),
            (keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        ):
            model = make(optimizer)
            call_shape(model, "fit", 8)
            model.set_gradient_accumulation_options(2)
            with pytest.raises(ValueError, match=words):
                call_shape(model, "fit", 8)
            call_shape(model, "predict", 8)


def test_a_learning_rate_that_is_a_function_is_refused():
    with IPUStrategy().scope():
        for optimizer in (
            keras.optimizers.SGD(lambda: 0.1),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lambda: 0.1)),
        ):
            with pytest.raises(ValueError, match="LearningRateSchedule"):
                call_shape(make(optimizer), "fit", 8)


def test_accumulation_of_the_optimizer_itself_works():
    x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    y = np.random.default_rng(1).standard_normal((32, 3)).astype("float32")

    def run():
        keras.utils.set_random_seed(0)
        model = make(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), steps=1)
        return model

    plain = run()
    with IPUStrategy().scope():
        model = run()
        model.steps_per_execution = 8
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
