"""Use private names of Keras for stateless steps. Checked on Keras 3.15.1.

Everything that the folder `step` needs of Keras beyond its public interface.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import StatelessScope, tree
from keras.src import backend
from keras.src.backend import get_stateless_scope as current_scope
from keras.src.backend.torch import core as backend_core
from keras.src.backend.torch import math as backend_math
from keras.src.backend.torch import random as backend_random
from keras.src.random.seed_generator import draw_seed
from keras.src.utils import traceback_utils

__all__ = [
    "add_losses",
    "all_tracked",
    "backend_core",
    "backend_math",
    "backend_random",
    "build_for",
    "compiled_objects",
    "current_scope",
    "draw_seed",
    "gives_training",
    "inner_optimizers",
    "loss_of",
    "mapping_of",
    "override_losses",
    "tensor_of",
    "traceback_utils",
    "track_loss",
    "trained_variables",
    "without_gradient",
]


def tensor_of(variable: Any) -> Any:
    """The tensor that holds a variable."""
    return variable._value


def mapping_of(scope: StatelessScope) -> dict[int, Any]:
    """The values of a stateless scope, by the identity of their variable."""
    mapping: dict[int, Any] = scope.state_mapping
    return mapping


def gives_training(model: Any) -> bool:
    """Whether the trainer passes `training` to the model's `call`."""
    return bool(model._call_has_training_arg)


def build_for(model: Any, batch: Any, *, compiled: bool) -> None:
    """Build the parts that are not built, as Keras does before a first step.

    Args:
        batch: `(x, y, sample_weight)`.
        compiled: metrics, loss and optimiser, too.
    """
    layers = all(layer.built for layer in model._flatten_layers())
    if not compiled:
        if not layers:
            symbolic = tree.map_structure(_symbolic, batch[0])
            backend.compute_output_spec(model, symbolic, training=False)
            model._post_build()
        return
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    if not layers or any(part is not None and not part.built for part in parts):
        model._symbolic_build(data_batch=batch)


def _symbolic(leaf: Any) -> Any:
    if leaf is None:
        return None
    return backend.KerasTensor(leaf.shape, backend.standardize_dtype(leaf.dtype))


def loss_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    """The loss that `fit` minimises, or `evaluate` reports."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def track_loss(model: Any, loss: Any, count: int) -> None:
    """Note a loss, the mean over `count` rows, in the metric of that name."""
    model._loss_tracker.update_state(loss, sample_weight=count)


def override_losses(model: Any, losses: Sequence[Any]) -> None:
    """Let `model.losses` be these; without any, the losses that the model collects itself."""
    model._losses_override.clear()
    if losses:
        model._losses_override = list(losses)


def add_losses(layer: Any) -> list[Any]:
    """The losses that a layer and those in it have added in this scope, without regularisers'."""
    losses = layer._get_own_losses()
    for inner in layer._flatten_layers(include_self=False):
        losses.extend(inner._get_own_losses())
    return list(losses)


def compiled_objects(model: Any) -> tuple[Any, ...]:
    """Objects that `compile` makes anew: a program is of those that it was traced with."""
    return (
        model.optimizer,
        getattr(model, "_loss_tracker", None),
        getattr(model, "_compile_loss", None),
        getattr(model, "_compile_metrics", None),
    )


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimiser was built for, in the order of its gradients."""
    return list(optimizer._trainable_variables)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """An optimiser and all that it hands gradients on to."""
    found: list[Any] = []
    waiting = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [getattr(one, "inner_optimizer", None), *getattr(one, "optimizers", ())]
    return found


def is_variable(value: Any) -> bool:
    """Whether a value is one of Keras' variables."""
    return isinstance(value, backend_core.Variable)


def has_callable_rate(optimizer: Any) -> bool:
    """Whether a learning rate is a Python function, which is no schedule."""
    from keras.optimizers.schedules import LearningRateSchedule

    rate: Callable[..., Any] | Any = getattr(optimizer, "_learning_rate", None)
    return callable(rate) and not isinstance(rate, LearningRateSchedule) and not is_variable(rate)


def is_layer(value: Any) -> bool:
    """Whether a value is a layer, or a model."""
    from keras import Layer

    return isinstance(value, Layer)


def is_overridden(model: Any, method: str) -> bool:
    """Whether a method of Keras' trainer is a user's own."""
    from keras.src.backend.torch.trainer import TorchTrainer

    plain = next(base for base in type(model).__mro__ if method in vars(base))
    return plain is not TorchTrainer and not plain.__module__.startswith("ipu_dynamo.")


def fill_in(node: Any, values: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node's call, of the values of its symbolic tensors, by identity."""
    args, kwargs = node.arguments.fill_in(values)
    return tuple(args), dict(kwargs)


def standard_inputs(functional: Any, inputs: Any, mask: Any) -> list[Any]:
    """The inputs of a Functional model as it takes them, in the order of its symbolic ones."""
    values: list[Any] = functional._standardize_inputs(inputs)
    if mask is not None:
        for value, part in zip(values, tree.flatten(mask), strict=False):
            if part is not None:
                backend.set_keras_mask(value, part)
    return values


def symbolic_inputs_of(functional: Any) -> list[Any]:
    """The symbolic inputs of a Functional model, flat."""
    return list(functional.inputs)


def symbolic_outputs_of(functional: Any) -> Any:
    """The nested symbolic outputs of a Functional model."""
    return functional._outputs_struct


def takes_context(operation: Any, name: str) -> bool:
    """Whether an operation takes an argument that calls hand on, as `training`."""
    return name in getattr(operation, "_call_context_args", ())


def takes_mask(layer: Any) -> bool:
    """Whether a layer's `call` has an argument `mask`."""
    return bool(layer._call_has_mask_arg)


def mask_of(value: Any) -> Any:
    """The mask that Keras has put on a tensor; None: none."""
    return backend.get_keras_mask(value)


def without_gradient(value: Any) -> Any:
    """The same numbers without a gradient; a tensor's mask, which metrics read, stays on it."""
    if not backend.is_tensor(value):
        return value
    result = value.detach()
    backend.set_keras_mask(result, backend.get_keras_mask(value))
    return result


def summed_loss(model: Any, loss: Any) -> Any:
    """A loss of a layer as it counts in the model's."""
    return model._aggregate_additional_loss(loss)


def described_functions(model: Any) -> list[Any]:
    """The functions whose lines say what a step computes: of layers, losses and metrics."""
    layers = model._flatten_layers()
    functions = [getattr(type(layer), "call", None) for layer in layers]
    functions += [getattr(type(loss), "call", None) for loss in losses_of(model)]
    functions += [getattr(type(metric), "update_state", None) for metric in metrics_of(model)]
    return [function for function in functions if function is not None]


def losses_of(model: Any) -> list[Any]:
    """The losses of `compile`, once it is built."""
    found = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ()
    return [one.loss for one in found if one.loss is not None]


def metrics_of(model: Any) -> list[Any]:
    """The metrics of a model, and those in them."""
    metrics = [metric for metric in model.metrics if metric is not None]
    return [*metrics, *(one for metric in metrics for one in getattr(metric, "metrics", ()))]


@contextmanager
def all_tracked(optimizer: Any) -> Iterator[None]:
    """Let `optimizer.variables` have all variables that an optimiser and those in it keep.

    Keras tracks none that is made while an optimiser around it is built, as Nadam's product of
    momentums in a LossScaleOptimizer.
    """
    known = {id(variable) for variable in optimizer.variables}
    added: list[tuple[list[Any], Any]] = []
    for one in inner_optimizers(optimizer):
        for value in vars(one).values():
            if is_variable(value) and id(value) not in known:
                known.add(id(value))
                one._variables.append(value)
                added.append((one._variables, value))
    try:
        yield
    finally:
        for variables, value in added:
            variables[:] = [variable for variable in variables if variable is not value]
