"""Mark the layers that are made, and the calls that are traced, in a block with its stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ipu_dynamo.keras.attach.thread_state import THREAD, extensions_active, innermost_strategy
from ipu_dynamo.keras.private.keras_graphs import (
    inbound_nodes,
)

MARK = "_ipu_dynamo_stage"  # of a layer, or of a node: the stage of the block that it was made in


class PipelineStage:
    """Assign layers and calls in its block to a pipeline stage.

    A layer constructed in the block has the stage in all its calls. A call in a block has the
    block's stage, even if its layer has another. The block has to be in the scope of a strategy.

    Args:
        stage: the stage, from 0.
    """

    def __init__(self, stage: int) -> None:
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise ValueError(f"a pipeline stage is an integer from 0 on, and not {stage!r}")
        self.stage = stage

    def __enter__(self) -> "PipelineStage":
        if innermost_strategy() is None:
            raise RuntimeError(
                f"PipelineStage({self.stage}) stands outside of a strategy's scope: "
                "enter `with strategy.scope():` first"
            )
        if THREAD.stage is not None:
            raise RuntimeError(
                f"PipelineStage({self.stage}) stands inside PipelineStage({THREAD.stage}): "
                "leave that one first"
            )
        THREAD.stage = self.stage
        THREAD.stages_entered += 1
        return self

    def __exit__(self, *exception: object) -> None:
        THREAD.stage = None


@contextmanager
def outside_of_stages() -> Iterator[None]:
    """Make calls that do not get the stage of an open block."""
    stage, THREAD.stage = THREAD.stage, None
    try:
        yield
    finally:
        THREAD.stage = stage


def mark_operations(original_new: Callable[..., Any]) -> Callable[..., Any]:
    """`Operation.__new__` that marks operations made in a block with its stage."""

    def new_operation(cls: Any, *args: Any, **kwargs: Any) -> Any:
        operation = original_new(cls, *args, **kwargs)
        if THREAD.stage is not None and extensions_active():
            vars(operation)[MARK] = THREAD.stage
        return operation

    return new_operation


def mark_nodes(original_init: Callable[..., None]) -> Callable[..., None]:
    """`Node.__init__` that marks calls in a block with its stage."""

    def init_node(node: Any, *args: Any, **kwargs: Any) -> None:
        original_init(node, *args, **kwargs)
        if not extensions_active():
            return
        stage = THREAD.stage if THREAD.stage is not None else _stage_of_original(node)
        if stage is not None:
            vars(node)[MARK] = stage

    return init_node


def _stage_of_original(node: Any) -> int | None:
    """The stage of the node that this one was cloned from, for a Functional of inner tensors.

    Keras names the tensors of such a clone after the original's.
    """
    names = [tensor.name for tensor in node.outputs]
    for candidate in inbound_nodes(node.operation)[:-1]:
        if names and [f"{tensor.name}_clone" for tensor in candidate.outputs] == names:
            stage: int | None = vars(candidate).get(MARK)
            return stage
    return None


def stage_of_call(operation: Any, node: Any) -> int | None:
    """The stage that blocks gave to a call: that of the call, else that of the layer."""
    stage: int | None = None if node is None else vars(node).get(MARK)
    return stage if stage is not None else vars(operation).get(MARK)
