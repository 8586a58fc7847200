"""Check what each replica has for itself: moving statistics, metrics, and what the host sees."""

from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 4)).astype("float32")
Y = RNG.integers(0, 3, 32).astype("int32")


def make(*, steps: int = 4, momentum: float = 0.5) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), L.BatchNormalization(momentum=momentum, name="norm"), L.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


def moving_mean(batches: list[np.ndarray], start: Any = 0.0, momentum: float = 0.5) -> np.ndarray:
    for batch in batches:
        start = momentum * start + (1 - momentum) * batch.mean(0)
    return np.asarray(start)


def test_the_host_sees_statistics_of_the_first_replica_and_each_goes_on_with_its_own():
    batches = [X[i : i + 4] for i in range(0, 32, 4)]
    with IPUStrategy(num_ipus=2).scope():
        model = make()
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        mean = model.layers[0].moving_mean
        np.testing.assert_allclose(mean.numpy(), moving_mean(batches[::2]), rtol=1e-5)
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        twice = [*batches[::2], *batches[::2]]
        np.testing.assert_allclose(mean.numpy(), moving_mean(twice), rtol=1e-5)
        # the second replica normalises by its own
        outputs = model.predict(X[:8], batch_size=4, steps=2, verbose=0)
        means = [moving_mean(batches[i::2] * 2) for i in (0, 1)]
        variances = [
            moving_mean([(b - b.mean(0)) ** 2 for b in batches[i::2]] * 2, 1.0) for i in (0, 1)
        ]
        kernel = model.layers[1].kernel.numpy()
        for i in (0, 1):
            x = (X[4 * i : 4 * i + 4] - means[i]) / np.sqrt(variances[i] + 1e-3)
            np.testing.assert_allclose(outputs[4 * i : 4 * i + 4], x @ kernel, rtol=1e-3, atol=1e-4)


def test_what_the_host_assigns_reaches_all_replicas():
    with IPUStrategy(num_ipus=2).scope():
        model = make()
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        model.layers[0].moving_mean.assign(np.ones(4, "float32"))
        model.layers[0].moving_variance.assign(np.ones(4, "float32"))
        outputs = model.predict(X[:8], batch_size=4, steps=2, verbose=0)
        expected = (X[:8] - 1.0) / np.sqrt(1 + 1e-3) @ model.layers[1].kernel.numpy()
        np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["none", "list", "sum", "mean"])
def test_metrics_show_the_host_the_states_reduced_and_go_on_with_their_own(method):
    with IPUStrategy(num_ipus=2).scope():
        model = make(steps=2)
        model.set_replication_options(method)
        model.evaluate(X, Y, batch_size=4, verbose=0)  # two executions
        counts = [v for v in model.metrics_variables if v.path.endswith("count")]
        expected = {"none": 16, "list": 16, "sum": 32, "mean": 16}[method]
        assert [float(v.value) for v in counts] == [expected] * 2


def test_a_pipeline_writes_statistics_in_the_order_of_micro_batches():
    results = []
    for num_ipus in (1, 2):
        with IPUStrategy(num_ipus=num_ipus).scope():
            model = make(steps=8)
            if num_ipus == 2:
                model.set_pipeline_stage_assignment([0, 1])
                model.set_pipelining_options(4)
            else:
                model.set_gradient_accumulation_options(4)
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
            model.evaluate(X, Y, batch_size=4, verbose=0)
            results.append([v.numpy() for v in (*model.variables, *model.metrics_variables)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_pipeline_warns_once_of_moving_statistics(caplog):
    with IPUStrategy(num_ipus=2).scope():
        model = make(steps=4)
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(4)
        for _ in range(2):
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        one = make(steps=4, momentum=1.0)
        one.set_pipeline_stage_assignment([0, 1])
        one.set_pipelining_options(4)
        one.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    told = [r for r in caplog.records if "moving statistics" in r.getMessage()]
    assert len(told) == 1
    assert "norm" in told[0].getMessage()


class Total(keras.metrics.Metric):
    """The sum of targets, whose result is the variable itself."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self) -> Any:
        return self.total


@pytest.mark.parametrize(("method", "total"), [("list", [1080.0, 1208.0]), ("sum", 2288.0)])
def test_a_metric_whose_result_is_its_variable_counts_for_each_replica(method, total):
    y = np.arange(56, 88, dtype="float32")[:, None]
    with IPUStrategy(num_ipus=2).scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
        model.compile("sgd", "mse", metrics=[Total()], steps_per_execution=2)
        model.set_replication_options(method)
        logs = model.evaluate(X, y, batch_size=8, verbose=0, return_dict=True)
    assert np.asarray(logs["total"]).tolist() == total
