"""Note the inputs that a Model subclass was built for, and find out whether it has stages."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import keras

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import THREAD, extensions_active
from ipu_dynamo.keras.private.keras_graphs import (
    build_by_run,
    flat_layers,
    in_stateless_scope,
    note_build_shapes,
    noted_build_shapes,
)
from ipu_dynamo.keras.private.keras_private import Functional
from ipu_dynamo.keras.stages.pipeline_stage import MARK
from ipu_dynamo.keras.stages.trace_model import symbolic_inputs, trace_of


def watch_build(model: Any) -> None:
    """Let a model note what its `build` gets; it stays Keras' own in all that Keras asks of it."""
    original: Callable[..., Any] = model.build

    @wraps(original)
    def build(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if isinstance(model, Functional):
            become_functional(model)
        else:
            note_inputs(model)

    vars(model)["build"] = build


def become_functional(model: Any) -> None:
    """Exchange the extension of a model whose own constructor has made it a Functional.

    Keras changes the bases of the user's class where that calls `super().__init__(inputs,
    outputs)`; before that the model was extended as a subclass.
    """
    from ipu_dynamo.keras.attach.extended_classes import extended_class
    from ipu_dynamo.keras.extensions import plain_class
    from ipu_dynamo.keras.stages.model_assignment import assign_from_blocks

    model.__class__ = extended_class(plain_class(type(model)))
    if extensions_active():
        assign_from_blocks(model)


def note_inputs(model: Any) -> None:
    """Take over the shapes of a build; trace the model if it has stages, and its user builds it."""
    shapes = noted_build_shapes(model)
    if not shapes or in_stateless_scope():  # there Keras puts numbers in the place of None
        return
    state = state_of(model)
    state.input_specs = symbolic_inputs(next(iter(shapes.values())))
    # files hold shapes, not tensors
    note_build_shapes(
        model, {name: keras.tree.map_structure(_shape, value) for name, value in shapes.items()}
    )
    if extensions_active() and has_stages(model, state.input_specs):
        trace_of(model)


def has_stages(model: Any, specs: Any) -> bool:
    """Whether a layer was made in a `PipelineStage`, or `call` enters one.

    The layers are known. To find entered stages, `call` runs once, on stand-ins of `specs`. Its
    exceptions are ignored here: tracing or running the model raises them again.
    """
    if any(MARK in vars(layer) for layer in flat_layers(model)):
        return True
    state = state_of(model)
    if state.meets_stages is None:
        before = THREAD.stages_entered
        with suppress(Exception):
            build_by_run(model, specs)
        state.meets_stages = THREAD.stages_entered != before
    return state.meets_stages


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, keras.KerasTensor) else value
