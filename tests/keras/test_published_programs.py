"""Run programs like the published ones, of which only the import lines are others.

Each builds a model as its kind does, trains and uses it in two stages, and has to reach what plain
Keras reaches on batches of all that one update sees.
"""

import numpy as np
import pytest

import ipu_dynamo

# as in a program: this package before Keras, which then runs on torch
from ipu_dynamo.keras import ipu

import keras  # isort: skip
from keras.ipu import PipelineStage, extensions  # isort: skip

BATCH, ACCUMULATION, EXECUTION = 8, 4, 8

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")


@pytest.fixture
def strategy():
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    ipu.utils.configure_ipu_system(config)
    yield ipu.ipu_strategy.IPUStrategy()
    ipu.config.reset_ipu_configuration()


def data():
    rng = np.random.default_rng(3)
    count = BATCH * EXECUTION * 2
    return rng.random((count, 2), "float32"), rng.integers(0, 3, count)


def compiled(model, rate, **options):
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def dense(units, **options):
    return keras.layers.Dense(units, **options)


def a_sequential():
    model = keras.Sequential([dense(8, activation="relu"), dense(8), dense(3)])
    model.build((None, 2))
    model.set_pipeline_stage_assignment([0, 0, 1])
    return model


def a_functional():
    inputs = keras.Input((2,))
    with PipelineStage(0):
        hidden = dense(8, activation="relu")(inputs)
    with PipelineStage(1):
        x = dense(8)(hidden)
        x = keras.layers.Add()([hidden, x])
        outputs = dense(3)(x)
    return keras.Model(inputs, outputs)


class Net(keras.Model):
    def __init__(self, staged=True):
        super().__init__()
        self.staged = staged
        self.first, self.second = dense(8, activation="relu"), dense(8)
        self.last = dense(3)

    def call(self, x):
        if not self.staged:
            return self.last(self.second(self.first(x)))
        with PipelineStage(0):
            x = self.second(self.first(x))
        with PipelineStage(1):
            return self.last(x)


def a_subclass():
    model = Net()
    model.build((None, 2))
    return model


def in_plain_keras(make):
    if make is a_subclass:
        model = Net(staged=False)
    elif make is a_sequential:
        model = keras.Sequential([dense(8, activation="relu"), dense(8), dense(3)])
    else:
        inputs = keras.Input((2,))
        hidden = dense(8, activation="relu")(inputs)
        x = keras.layers.Add()([hidden, dense(8)(hidden)])
        model = keras.Model(inputs, dense(3)(x))
    model(np.zeros((1, 2), "float32"))
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [a_sequential, a_functional, a_subclass])
def test_a_published_program_reaches_what_plain_keras_does(make, strategy, capsys):
    x, y = data()
    with strategy.scope():
        model = make()
        start = model.get_weights()
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=ACCUMULATION,
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
        )
        compiled(model, 0.1, steps_per_execution=EXECUTION)
        model.print_pipeline_stage_assignment_summary()
        history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, shuffle=False)
        results = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
    assert capsys.readouterr().out.count("Pipeline Stage") == 1
    assert isinstance(model, extensions.Extension)

    plain = compiled(in_plain_keras(make), 0.1)
    plain.set_weights(start)
    expected = plain.fit(x, y, batch_size=BATCH * ACCUMULATION, epochs=3, verbose=0, shuffle=False)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        results, plain.evaluate(x, y, batch_size=BATCH, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        outputs, plain.predict(x, batch_size=BATCH, verbose=0), rtol=1e-4, atol=1e-5
    )


def test_jit_compile_goes_to_the_machine_without_extensions():
    x, _ = data()
    strategy = ipu.ipu_strategy.IPUStrategy(enable_keras_extensions=False)
    before = ipu_dynamo.programs()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), dense(3)])
        compiled(model, 0.1, jit_compile=True)
        outputs = model.predict(x, batch_size=len(x), verbose=0)
    (program,) = (each for each in ipu_dynamo.programs() if each not in before)
    assert "@forward" in str(program)
    np.testing.assert_allclose(outputs, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
