"""Make the classes of extended models: a mixin before the user's class, under the same name."""

import types
import weakref
from collections.abc import Callable
from typing import Any

from ipu_dynamo.keras.extensions import (
    Extension,
    FunctionalExtension,
    ModelExtension,
    SequentialExtension,
)
from ipu_dynamo.keras.private.keras_graphs import (
    flat_layers,
)
from ipu_dynamo.keras.private.keras_private import (
    Functional,
    Model,
    Sequential,
    functional_init_arguments,
    registered_names,
)
from ipu_dynamo.keras.stages.model_build import watch_build

# by plain class and mixin; without a model that uses it an extended class goes, and is made again
_EXTENDED: weakref.WeakValueDictionary[tuple[int, type], type] = weakref.WeakValueDictionary()


def make_model(
    original_new: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An instance of `cls`, extended, for the place of `Model.__new__`."""
    if cls is Model and functional_init_arguments(args, kwargs):
        return original_new(cls, *args, **kwargs)  # Keras makes a Functional: it comes here again
    model = original_new(extended_class(cls), *args, **kwargs)
    if isinstance(model, ModelExtension):
        watch_build(model)
    return model


def extend(model: Any) -> Any:
    """Give an existing model, built or not, and the models inside it the extension; return it.

    Args:
        model: of Keras; it is changed in place.
    """
    if not isinstance(model, Model):
        raise TypeError(f"only a Keras model can be extended, and not a {type(model).__name__}")
    for inner in [model, *(layer for layer in flat_layers(model) if isinstance(layer, Model))]:
        if isinstance(inner, Extension):
            continue
        inner.__class__ = extended_class(type(inner))
        if isinstance(inner, ModelExtension):
            watch_build(inner)
    return model


def extended_class(cls: type) -> type:
    """The class of extended models for `cls`; itself if it is one."""
    if issubclass(cls, Extension):
        return cls
    mixin = _mixin(cls)
    key = (id(cls), mixin)
    extended = _EXTENDED.get(key)
    if extended is None or cls not in extended.__bases__:
        extended = _EXTENDED[key] = _derive(cls, mixin)
    return extended


def _mixin(cls: type) -> type:
    if issubclass(cls, Sequential):
        return SequentialExtension
    if issubclass(cls, Functional):
        return FunctionalExtension
    return ModelExtension


def _derive(cls: type, mixin: type) -> type:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if cls.__doc__ is not None:
        namespace["__doc__"] = cls.__doc__
    extended = types.new_class(cls.__name__, (mixin, cls), {}, lambda body: body.update(namespace))
    name = registered_names().get(cls)
    if name is not None:  # files name the plain class
        registered_names()[extended] = name
    return extended
