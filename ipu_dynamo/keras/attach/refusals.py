"""Refuse, before any step, extended models that cannot run as they are written."""

from collections.abc import Sequence
from typing import Any, Literal

import keras

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import THREAD
from ipu_dynamo.keras.private.keras_graphs import flat_layers
from ipu_dynamo.keras.private.keras_private import Functional, Sequential

_ALWAYS = ("train_step", "make_train_function", "make_test_function", "make_predict_function")
_PIPELINED = ("test_step", "predict_step")


def refuse_in_callback(model: Any, method: str) -> None:
    """Refuse to execute a model in an asynchronous callback of it.

    Raises:
        RuntimeError: this thread calls them, while a program changes the model's weights.
    """
    if THREAD.calls_back is model:
        raise RuntimeError(
            f"{method} of model {model.name} is called by an asynchronous callback, while a "
            "program of the model runs: do it in a hook of epochs, or after "
            "set_asynchronous_callbacks(False)"
        )


def check_execution(
    model: Any, kind: Literal["fit", "evaluate", "predict"], *, method: str | None = None
) -> None:
    """Check that `fit`, `evaluate` or `predict` of an extended model can run as a program.

    Args:
        method: the called method, as `train_on_batch`; `kind` if left out.

    Raises:
        RuntimeError: `run_eagerly` is set, or a method is overridden that a program replaces.
        NotImplementedError: there is no `call`.
    """
    if model.run_eagerly:
        raise RuntimeError(
            f"{kind} of model {model.name} runs as a program, and run_eagerly is True: set it to "
            "False, in compile() or on the model"
        )
    # a user's own fit would never be called: the extension's stands before it
    _check_methods(model, (method or kind, *_ALWAYS))
    if state_of(model).assignment is not None:
        check_pipelined(model)
    if _definer(model, "call") is None and type(model).call is keras.Model.call:
        raise NotImplementedError(
            f"class {type(model).__name__} of model {model.name} has no call method: define one"
        )


def check_pipelined(model: Any) -> None:
    """Check that stages, which run the layers of models inside, leave out no method of a user.

    Raises:
        RuntimeError: they would.
    """
    _check_methods(model, _PIPELINED)
    for part in [model, *flat_layers(model)]:
        if isinstance(part, Functional | Sequential):
            _check_methods(part, ("call",))


def _check_methods(model: Any, names: Sequence[str]) -> None:
    for name in names:
        definer = _definer(model, name)
        if definer is not None:
            raise RuntimeError(
                f"class {definer.__name__} of model {model.name} overrides {name}, which a program "
                f"replaces: remove {name}, or make the strategy with enable_keras_extensions=False"
            )


def _definer(model: Any, name: str) -> type | None:
    """The class of a user that overrides a method of Keras, if one does."""
    for cls in type(model).__mro__:
        package = cls.__module__.split(".")[0]
        if name in vars(cls) and package != "ipu_dynamo":  # not the extension's own
            return None if package == "keras" else cls
    return None
