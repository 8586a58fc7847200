"""Check that a trace of `fit` has its programs, pass by pass, and changes nothing."""

import keras
import numpy as np

import ipu_dynamo
from ipu_dynamo.keras import IPUStrategy
from tests.keras.loop.cases import arrays
from tests.profiling.strict_reader import read_trace

STEPS = 4


def trained(run):
    """The weights of a pipelined model after `run`, which is given its `fit`."""
    keras.utils.set_random_seed(1)
    x, y = arrays(8 * STEPS)
    with IPUStrategy(2).scope():
        layers = keras.layers.Dense(3), keras.layers.Dense(2)
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=STEPS)
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(STEPS)
        run(lambda: model.fit(x, y, batch_size=4, verbose=0))
        return model.get_weights()


def test_a_trace_of_fit_has_its_calls_passes_and_compilations(tmp_path):
    file = tmp_path / "trace.json"

    def recorded(fit):
        with ipu_dynamo.profile(file):
            fit()

    for ours, plain in zip(trained(recorded), trained(lambda fit: fit()), strict=True):
        assert np.array_equal(ours, plain)
    trace = read_trace(file)
    assert {"IPU 0", "IPU 1"} < {*trace.processes.values()}
    assert [span["args"] for span in trace.of("call")] == [{"complete": True}] * 2
    titles = "stage 0 forward", "stage 1 forward and backward", "stage 0 backward"
    assert {span["name"].partition(",")[0] for span in trace.of("stage pass")} == {*titles}
    assert len(trace.of("stage pass")) == 2 * STEPS * len(titles)
    assert trace.of("copy")
    assert trace.of("pass")
    assert any(span["name"].startswith("compiling ") for span in trace.of("job"))
