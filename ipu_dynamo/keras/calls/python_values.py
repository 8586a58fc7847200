"""Read the Python values that a trace freezes, so that a program notices when one has changed.

A step is traced once, but plain Keras runs its Python for every batch. By then an attribute of an
optimizer, a schedule, a loss or a user's layer may have another value.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import keras
import numpy as np
import torch

from ipu_dynamo.keras.private.keras_graphs import flat_layers
from ipu_dynamo.keras.private.stateless_names import (
    inner_optimizers,
    is_layer,
    is_variable,
    losses_of,
    metrics_of,
)
from ipu_dynamo.keras.step.step_variables import Kind

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_LIBRARIES = frozenset({"keras", "torch", "numpy", "builtins", "ipu_dynamo", "threading"})
_DEPTH = 4  # of objects in objects
# attributes that the trainer itself sets on a model
_BOOKKEEPING = frozenset(
    (
        *("built", "training", "stop_training", "stop_evaluating", "stop_predicting", "history"),
        *("run_eagerly", "jit_compile", "compiled", "steps_per_execution", "loss", "optimizer"),
        *("train_function", "test_function", "predict_function", "iterations", "name", "_name"),
        *("_dtype", "_dtype_policy", "_tracker", "_lock", "_auto_track_enabled"),
        *("_compile_config", "_trainable_variables_indices"),
    )
)


def python_values(model: Any, kind: Kind) -> dict[str, Any]:
    """Numbers, texts and arrays in attributes and closures, by their path.

    They are those of the optimiser, of losses and metrics, and of objects in layers whose class or
    function is a user's. Variables and tensors are not among them: a program reads these.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    if kind == "fit":
        for optimizer in inner_optimizers(model.optimizer):
            _walk(f"optimizer {optimizer.name}", optimizer, found, seen, _DEPTH)
    if kind != "predict":
        for loss in losses_of(model):
            _walk(f"loss {loss.name}", loss, found, seen, _DEPTH)
        for metric in metrics_of(model):
            _walk_users(f"metric {metric.name}", metric, found, seen)
    _walk_users(f"model {model.name}", model, found, seen)
    for layer in flat_layers(model):
        _walk_users(f"layer {layer.name}", layer, found, seen)
    return found


def different(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """The paths whose values differ."""
    if first == second:
        return set()
    missing = object()
    paths = {*first, *second}
    return {path for path in paths if first.get(path, missing) != second.get(path, missing)}


def _walk_users(path: str, owner: Any, found: dict[str, Any], seen: set[int]) -> None:
    """Of an object of a user's class all attributes, of Keras' own those that are a user's."""
    if _is_users(type(owner)):
        _walk_attributes(path, owner, _own_names(owner), found, seen, _DEPTH)
        return
    for name, value in vars(owner).items():
        if isinstance(value, types.FunctionType) or _is_users(type(value)):
            _walk(f"{path}.{name}", value, found, seen, _DEPTH)


def _walk(path: str, value: Any, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if isinstance(value, _NUMBERS):
        found[path] = type(value), value
    elif isinstance(value, np.ndarray | np.generic):
        found[path] = value.shape, value.dtype, value.tobytes()
    elif depth == 0 or id(value) in seen or is_variable(value) or isinstance(value, torch.Tensor):
        return
    elif isinstance(value, list | tuple):
        seen.add(id(value))
        if value and not is_variable(value[0]):
            for number, item in enumerate(value):
                _walk(f"{path}[{number}]", item, found, seen, depth - 1)
    elif isinstance(value, Mapping):
        seen.add(id(value))
        for key, item in list(value.items()):
            if isinstance(key, _NUMBERS):
                _walk(f"{path}[{key!r}]", item, found, seen, depth - 1)
    elif isinstance(value, types.MethodType):
        _walk(path, value.__self__, found, seen, depth - 1)
    elif isinstance(value, types.FunctionType):
        seen.add(id(value))
        for name, item in _free_values(value):
            _walk(f"{path}: {name}", item, found, seen, depth - 1)
    elif not _is_closed(value):
        seen.add(id(value))
        _walk_attributes(path, value, _own_names(value), found, seen, depth)


def _walk_attributes(
    path: str, owner: Any, names: Any, found: dict[str, Any], seen: set[int], depth: int
) -> None:
    values = {name: item for name in names if (item := vars(owner).get(name)) is not None}
    for base in type(owner).__mro__:  # class attributes of the user's, which a callback may set
        if _is_users(base):
            values = {**_plain(vars(base)), **values}
    for name, item in values.items():
        _walk(f"{path}.{name}", item, found, seen, depth - 1)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _NUMBERS) and not name.startswith("__")
    }


def _own_names(owner: Any) -> list[str]:
    known = _names_of_layers() if is_layer(owner) else _BOOKKEEPING
    return [name for name in vars(owner) if name not in known and "_ipu_dynamo" not in name]


def _free_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that a user's function reads in addition to its arguments."""
    if not _is_users(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_NUMBERS, np.ndarray, list, dict)) and value is not None:
            yield name, value


def _is_closed(value: Any) -> bool:
    """Whether an object is not searched for values: a class, a layer, or of a library."""
    if isinstance(value, type | types.ModuleType | torch.nn.Module) or is_layer(value):
        return True
    package = type(value).__module__.split(".")[0]
    return not hasattr(value, "__dict__") or (package in _LIBRARIES and package != "keras")


def _is_users(kind: Any) -> bool:
    return str(kind.__module__).split(".")[0] not in _LIBRARIES


@cache
def _names_of_layers() -> frozenset[str]:
    """Attributes that every layer or model has."""
    plain = (keras.Layer(), keras.Sequential())
    return _BOOKKEEPING.union(*(vars(one) for one in plain))
