"""Draw small Keras models with losses, weights and stages, and train them with and without us."""

from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from hypothesis import strategies as st

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.step.machine_shape import stages_as_run

L = keras.layers
Form = Literal["sequential", "functional", "subclass", "nested", "masked"]
MAPPINGS = {
    1: [(0,)],
    2: [(0, 1), (0, 0), (1, 0)],
    3: [(0, 1, 2), (0, 1, 0), (2, 0, 1), (0, 0, 1), (0, 0, 0)],
}
FORMS: tuple[Form, ...] = ("sequential", "functional", "subclass", "nested", "masked")
WORDS = 5  # of the masked models, whose word 0 is masked
METRICS = {
    "accuracy": lambda name: keras.metrics.SparseCategoricalAccuracy(name),
    "entropy": lambda name: keras.metrics.SparseCategoricalCrossentropy(name, from_logits=True),
    "top 2": lambda name: keras.metrics.SparseTopKCategoricalAccuracy(2, name),
}


@dataclass(frozen=True)
class Case:
    """A model, how it is executed, and with which data.

    Args:
        form: how the model is written.
        stages: how many a pipeline has; 1: no pipeline.
        sequential: stages take one micro-batch after the other.
        mapping: the IPU of each stage.
        updates: of a call.
        weighted_metrics: those of `metrics` that take the sample weights, too.
    """

    form: Form
    stages: int
    sequential: bool
    mapping: tuple[int, ...]
    accumulation: int
    updates: int
    replicas: int
    reduction: str
    sample_weights: bool
    class_weights: bool
    regularised: bool
    metrics: tuple[str, ...]
    weighted_metrics: tuple[str, ...]
    seed: int

    @property
    def steps(self) -> int:
        return self.accumulation * self.updates

    @property
    def ipus(self) -> int:
        return self.replicas * (1, 2, 4, 4)[max(self.mapping)]

    @property
    def rate(self) -> float:
        """What equals a rate of 1 of plain Keras on the whole batch."""
        return 1.0 / (self.replicas * (self.accumulation if self.reduction == "sum" else 1))


@st.composite
def cases(draw: Any, *, forms: tuple[Form, ...] = FORMS, pipelined: bool | None = None) -> Case:
    """Cases whose pipelines have enough micro-batches."""
    several = draw(st.booleans()) if pipelined is None else pipelined
    stages = draw(st.sampled_from((2, 3))) if several else 1
    sequential, mapping = draw(st.booleans()), draw(st.sampled_from(MAPPINGS[stages]))
    fill = 1 if sequential else 2 * stages_as_run(mapping) - 1
    replicas = draw(st.sampled_from((1, 1, 2)))
    # the mean of two weighted means is that of all for equal sums of weights only
    weighted = st.sets(st.sampled_from(sorted(METRICS))) if replicas == 1 else st.just(())
    return Case(
        form=draw(st.sampled_from(forms)),
        stages=stages,
        sequential=sequential,
        mapping=mapping,
        accumulation=draw(st.integers(fill, max(fill, 3))),
        updates=draw(st.integers(1, 2)),
        replicas=replicas,
        reduction=draw(st.sampled_from(("sum", "mean", "running_mean"))),
        sample_weights=draw(st.booleans()),
        class_weights=draw(st.booleans()),
        regularised=draw(st.booleans()),
        metrics=tuple(draw(st.sets(st.sampled_from(sorted(METRICS))))),
        weighted_metrics=tuple(draw(weighted)),
        seed=draw(st.integers(0, 99)),
    )


class Subclass(keras.Model):
    """A user's class, with a layer that is called twice."""

    def __init__(self, regularizer: Any) -> None:
        super().__init__()
        self.first = L.Dense(5, activation="tanh", kernel_regularizer=regularizer)
        self.second = L.Dense(5, activation="sigmoid", activity_regularizer=regularizer)
        self.last = L.Dense(3)

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs)
        hidden = self.second(hidden)
        return self.last(self.second(hidden) + hidden)


def make_model(case: Case, *, rate: float = 0.1) -> Any:
    """The model of a case, compiled; extended and with stages if a scope is open."""
    keras.utils.set_random_seed(case.seed)
    regularizer = keras.regularizers.L2(0.02) if case.regularised else None
    model = _FORMS[case.form](regularizer)
    losses: Any = _classes()
    metrics: Any = [METRICS[name](name) for name in case.metrics]
    weighted: Any = [METRICS[name](f"weighted {name}") for name in case.weighted_metrics]
    if case.form == "functional":
        losses, metrics, weighted = [losses, "mse"], [metrics, ["mae"]], [weighted, []]
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        losses,
        metrics=metrics,
        weighted_metrics=weighted,
    )
    if case.form == "subclass":
        model(np.zeros((1, 4), "float32"))
    return model


def make_extended(case: Case, *, rate: float = 0.1) -> Any:
    """The same in the open scope, with the case's options."""
    model = make_model(case, rate=rate * case.rate)
    model.steps_per_execution = case.steps
    model.set_replication_options("mean")
    if case.stages == 1:
        model.set_gradient_accumulation_options(case.accumulation, case.reduction)
        return model
    elements = model.get_pipeline_stage_assignment()
    _assign(elements, case.stages)
    model.set_pipeline_stage_assignment(elements)
    model.set_pipelining_options(
        case.accumulation,
        device_mapping=list(case.mapping),
        gradient_accumulation_reduction_method=case.reduction,
        pipeline_schedule="sequential" if case.sequential else "grouped",
    )
    return model


def data(case: Case, *, rows: int = 2) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights, for one call; `rows` of each micro-batch."""
    count = rows * case.steps * case.replicas
    rng = np.random.default_rng(case.seed)
    x = rng.standard_normal((count, 4)).astype("float32")
    classes = rng.integers(0, 3, count).astype("int32")
    weights = rng.random(count).astype("float32") if case.sample_weights else None
    if case.form == "masked":  # one word of each row is: a loss is divided by how many are not
        words = rng.integers(1, WORDS, (count, 4)).astype("int32")
        words[np.arange(count), rng.integers(0, 4, count)] = 0
        if weights is not None:  # of each word, as metrics with a mask take them
            weights = rng.random((count, 4)).astype("float32")
        return words, rng.integers(0, 3, (count, 4)).astype("int32"), weights
    if case.form != "functional":
        return x, classes, weights
    other = rng.standard_normal((count, 2)).astype("float32")
    both = None if weights is None else [weights, weights[::-1].copy()]
    return [x, x[:, :2].copy()], [classes, other], both


def fit_arguments(case: Case) -> dict[str, Any]:
    """Class weights, where Keras takes them: of one output, and without sample weights."""
    simple = case.form not in ("functional", "masked")
    if case.class_weights and not case.sample_weights and simple:
        return {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}
    return {}


def strategy(case: Case) -> IPUStrategy:
    """A machine for the case."""
    return IPUStrategy(num_ipus=case.ipus)


def _assign(elements: list[Any], stages: int) -> None:
    """Give layers stages in the order of their first calls; all calls of one are on its stage."""
    flat = _flat(elements)
    layers = list(dict.fromkeys(id(element.layer) for element in flat))
    for element in flat:
        element.pipeline_stage = layers.index(id(element.layer)) * stages // len(layers)


def _flat(elements: list[Any]) -> list[Any]:
    found: list[Any] = []
    for element in elements:
        if element.is_nested_model:
            found += _flat(element.pipeline_stage_assignments)
        else:
            found.append(element)
    return found


def _classes() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sequential(regularizer: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(6, activation="tanh", kernel_regularizer=regularizer),
            L.Dense(5, activity_regularizer=regularizer),
            L.LayerNormalization(),
            L.Dense(3),
        ]
    )


def _masked(regularizer: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            L.Embedding(WORDS, 5, mask_zero=True, embeddings_regularizer=regularizer),
            L.Dense(5, activation="tanh"),
            L.Dense(3),
        ]
    )


def _functional(regularizer: Any) -> Any:
    """Two inputs, two branches, a skip, two outputs."""
    first, second = keras.Input((4,), name="first"), keras.Input((2,), name="second")
    left = L.Dense(5, activation="tanh", kernel_regularizer=regularizer, name="left")(first)
    right = L.Dense(5, activation="sigmoid", name="right")(second)
    both = L.Add(name="both")([left, right]) * 0.5
    deep = L.Dense(5, activation="tanh", bias_regularizer=regularizer, name="deep")(both)
    skip = keras.ops.relu(deep + left)
    return keras.Model(
        [first, second],
        [L.Dense(3, name="classes")(skip), L.Dense(2, name="values")(deep)],
    )


def _nested(regularizer: Any) -> Any:
    inner_input = keras.Input((5,))
    hidden = L.Dense(5, activation="tanh", kernel_regularizer=regularizer, name="inner1")(
        inner_input
    )
    inner = keras.Model(inner_input, L.Dense(5, name="inner2")(hidden) + inner_input, name="inner")
    x = keras.Input((4,))
    outer = L.Dense(5, name="outer1", activity_regularizer=regularizer)(x)
    return keras.Model(x, L.Dense(3, name="outer2")(inner(outer)))


_FORMS = {
    "sequential": _sequential,
    "functional": _functional,
    "subclass": Subclass,
    "nested": _nested,
    "masked": _masked,
}
