"""Check every metric of Keras in evaluate and fit: results, and the objects' variables."""

import inspect

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy

CLASSES, ROWS, BATCH = 3, 24, 4
ARGUMENTS = {
    "IoU": {"num_classes": 2, "target_class_ids": [0, 1]},
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.5},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
# of values, not of targets and outputs; and bases
ELSEWHERE = {"Mean", "Sum", "Metric"}
KINDS = ("numbers", "binary", "one hot", "sparse")


def targets(kind):
    rng = np.random.default_rng(2)
    match kind:
        case "numbers":
            return rng.uniform(0.1, 2, (ROWS, CLASSES)).astype("float32")
        case "binary":
            return rng.integers(0, 2, (ROWS, 1)).astype("float32")
        case "one hot":
            return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, ROWS)]
        case _:
            return rng.integers(0, CLASSES, (ROWS, 1)).astype("float32")


def inputs():
    return np.random.default_rng(1).standard_normal((ROWS, 4)).astype("float32")


def metric_classes():
    return {
        name: cls
        for name, cls in vars(keras.metrics).items()
        if inspect.isclass(cls)
        and issubclass(cls, keras.metrics.Metric)
        and cls.__name__ == name
        and name not in ELSEWHERE
    }


def metric(name):
    return metric_classes()[name](**ARGUMENTS.get(name, {}), name=name)


def works(name, kind):
    """Whether plain Keras computes a metric on data of a kind."""
    y = targets(kind)
    shape = ROWS, 1 if kind == "binary" else CLASSES
    outputs = np.random.default_rng(3).uniform(0.1, 0.9, shape).astype("float32")
    one = metric(name)
    try:
        one.update_state(torch.from_numpy(y), torch.from_numpy(outputs))
        result = one.result()
    except Exception:
        return False
    return isinstance(result, dict) or bool(torch.isfinite(torch.as_tensor(result)).all())


def model_of(kind, names, steps=1):
    keras.utils.set_random_seed(4)
    activation = "sigmoid" if kind == "binary" else "softmax"
    width = 1 if kind == "binary" else CLASSES
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, activation=activation)])
    model.compile(
        keras.optimizers.SGD(0.5),
        "sparse_categorical_crossentropy" if kind == "sparse" else "mse",
        metrics=[metric(name) for name in names],
        weighted_metrics=[] if kind == "sparse" else ["mae"],
        steps_per_execution=steps,
    )
    return model


def test_every_class_is_met():
    met = {name for kind in KINDS for name in metric_classes() if works(name, kind)}
    assert met == metric_classes().keys()


SOME = {
    "numbers": ["CosineSimilarity", "R2Score", "PearsonCorrelation"],
    "binary": ["AUC", "BinaryIoU"],
    "one hot": ["F1Score", "OneHotMeanIoU", "Precision"],
    "sparse": ["SparseCategoricalCrossentropy", "MeanIoU"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_some_metrics_are_those_of_plain_keras(kind):
    compare(kind, SOME[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_metrics_are_those_of_plain_keras(kind):
    compare(kind, [name for name in metric_classes() if works(name, kind)])


def compare(kind, names):
    """Compare metrics of evaluate and fit, and the metrics' variables, with plain Keras."""
    x, y, weights = inputs(), targets(kind), np.linspace(0.5, 2, ROWS)
    with IPUStrategy().scope():
        model = model_of(kind, names, steps=3)
    plain = model_of(kind, names)
    kwargs = {"batch_size": BATCH, "verbose": 0, "sample_weight": weights}
    for _ in range(2):  # the second evaluation begins with fresh metrics
        with IPUStrategy().scope():
            ours = model.evaluate(x, y, return_dict=True, **kwargs)
        theirs = plain.evaluate(x, y, return_dict=True, **kwargs)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for mine, theirs in zip(model.metrics_variables, plain.metrics_variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6, err_msg=mine.path)
    with IPUStrategy().scope():
        ours = model.fit(x, y, epochs=2, shuffle=False, **kwargs).history
    theirs = plain.fit(x, y, epochs=2, shuffle=False, **kwargs).history
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class Watched(keras.Model):
    """A subclass with a metric of its own, and one in a layer, of values."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.mean = keras.metrics.Mean(name="mean_output")
        self.sum = keras.metrics.Sum(name="sum_output")

    def call(self, x):
        y = self.dense(x)
        self.mean.update_state(y)
        self.sum.update_state(y)
        return y


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["none", "list", "sum", "mean"])
def test_metrics_of_two_replicas_are_reduced(method):
    x, _ = inputs(), None
    keras.utils.set_random_seed(4)
    with IPUStrategy(2).scope():
        model = Watched()
        model.compile("sgd", "mse", steps_per_execution=3)
        model.set_replication_options(method)
        results = model.evaluate(x, x[:, :2], batch_size=BATCH, verbose=0, return_dict=True)
    outputs = model.dense(x).detach().numpy().reshape(3, 2, -1)
    means, sums = outputs.mean((0, 2)), outputs.sum((0, 2))
    reduce = {
        "none": lambda values: values[-1],
        "list": list,
        "sum": np.sum,
        "mean": np.mean,
    }[method]
    np.testing.assert_allclose(results["mean_output"], reduce(means), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(results["sum_output"], reduce(sums), rtol=1e-4, atol=1e-5)
    assert np.shape(results["loss"]) == np.shape(reduce(means))
    state = {"none": sums[-1], "list": sums[-1], "sum": sums.sum(), "mean": sums.mean()}[method]
    np.testing.assert_allclose(float(model.sum.total), state, rtol=1e-4, atol=1e-5)
