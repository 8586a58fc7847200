"""Choose the place of a model's state in Keras' files, and restore it from there."""

import logging
from collections.abc import Callable
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import extensions_active
from ipu_dynamo.keras.private.keras_graphs import (
    KERAS_MODELS,
    loads_as_functional,
)
from ipu_dynamo.keras.private.keras_private import (
    Functional,
    Sequential,
)
from ipu_dynamo.keras.stored.stored_state import KEY, restore_state, stored_state

logger = logging.getLogger("ipu_dynamo.keras")


def config_with_state(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration, with its state where that belongs there."""
    return {**config, KEY: stored_state(model)} if _in_config(model) else config


def build_config_with_state(model: Any, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A model's build configuration, with its state; None before the model is built."""
    if config is None or _in_config(model):
        return config
    if isinstance(model, Functional):  # built by its constructor: Keras will not build it again
        logger.info(
            "a file of model %s does not hold its options for IPUs, as its class has a constructor "
            "of its own: set them again after loading it",
            model.name,
        )
        return config
    return {**config, KEY: stored_state(model)}


def _in_config(model: Any) -> bool:
    """Whether `from_config` of the model's plain class leaves a key alone that it does not know.

    That of a user's class may hand the configuration on to its constructor.
    """
    if not isinstance(model, Functional | Sequential):
        return False
    definer = next(
        cls
        for cls in type(model).__mro__
        if "from_config" in vars(cls) and "ipu_dynamo" not in cls.__module__.split(".")
    )
    keras_reads_it = definer in KERAS_MODELS
    return keras_reads_it and (isinstance(model, Sequential) or loads_as_functional(type(model)))


def is_extended_class(cls: type) -> bool:
    """Whether a class is one of extended models."""
    from ipu_dynamo.keras.extensions import Extension

    return issubclass(cls, Extension)


def restoring(original: Any) -> Callable[..., Any]:
    """`from_config` that restores an extended model's state; `original` is the raw classmethod."""

    def from_config(cls: Any, config: Any, custom_objects: Any = None) -> Any:
        function = original.__func__
        if not extensions_active() or not isinstance(config, dict) or KEY not in config:
            model = function(cls, config, custom_objects=custom_objects)
            if is_extended_class(cls):  # files name the plain class: this is `clone_model`
                state_of(model).cloned = True
            return model
        config = dict(config)
        stored = config.pop(KEY)
        model = function(cls, config, custom_objects=custom_objects)
        restore_state(model, stored)
        return model

    return from_config


def restore_build_config(
    model: Any, config: dict[str, Any], build: Callable[[dict[str, Any]], None]
) -> None:
    """Build a model from its build configuration by `build`, and restore what else stands there."""
    config = dict(config)
    stored = config.pop(KEY, None)
    build(config)
    if stored is not None and extensions_active() and not state_of(model).cloned:
        restore_state(model, stored)
