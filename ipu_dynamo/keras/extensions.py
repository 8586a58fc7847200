"""Extend Keras models by three mixins; the methods call the parts that do the work."""

from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of


class Extension:
    """What the three extensions have in common."""

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Choose whether callbacks come for each step, while the program runs."""
        state_of(self).change(asynchronous_callbacks=bool(asynchronous))


class FunctionalExtension(Extension):
    """Methods of an extended Functional model."""


class SequentialExtension(Extension):
    """Methods of an extended Sequential model."""


class ModelExtension(Extension):
    """Methods of an extended Model subclass."""


def is_extended(model: Any) -> bool:
    """Whether a model has one of the extensions."""
    return isinstance(model, Extension)
