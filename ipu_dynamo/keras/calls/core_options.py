"""Translate the user's settings of a model into the options of the core."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.private.stateless_names import backend_core
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod,
    RecomputationMode,
)
from ipu_dynamo.keras.step.machine_shape import CallShape, is_sequential_schedule
from ipu_dynamo.keras.step.step_variables import Kind, StepVariable
from ipu_dynamo.options import Location, Locations, Options, StageSpec, Strategy
from ipu_dynamo.options.replica_groups import ReplicaGroups

_RECOMPUTE = {
    RecomputationMode.Auto: "auto",
    RecomputationMode.RecomputeThenBackpropagate: "stages",
    RecomputationMode.RecomputeAndBackpropagateInterleaved: "all",
}
# lines of these are Keras' machinery; a program names those of layers, losses and metrics
MACHINERY = tuple(
    f"keras/src/{part}"
    for part in (
        "backend",
        "ops",
        "random",
        "tree",
        "utils",
        "models",
        "trainers",
        "layers/layer.py",
        "metrics/metric.py",
        "losses/loss.py",
    )
)


def core_options(
    model: Any,
    kind: Kind,
    shape: CallShape,
    ipus: Sequence[int] | None,
    variables: Sequence[StepVariable],
) -> Options:
    """The options of a program.

    Args:
        ipus: of every stage; None: the model is not pipelined.
        variables: of the step; with several replicas each has its own of those that a step assigns.
    """
    settings = state_of(model).settings
    training = kind == "fit"
    running = settings.reduction is GradientAccumulationReductionMethod.RUNNING_MEAN
    more: dict[str, Any] = {}
    if training:
        more["gradient_accumulation"] = shape.accumulation
        more["reduction"] = "mean" if running else "sum"
        more["mean_strategy"] = "running" if running else "post"
    if ipus is not None:
        stages = tuple(StageSpec((f"stage{k}",), ipu) for k, ipu in enumerate(ipus))
        sequential = is_sequential_schedule(model)
        more["strategy"] = Strategy("sharded" if sequential else "pipelined", stages=stages)
        mode = settings.pipelining_keywords.get("recomputation_mode", RecomputationMode.Auto)
        more["recompute"] = _RECOMPUTE[mode or RecomputationMode.Auto]
    if shape.replicas > 1:
        alone = ReplicaGroups(1)
        more["replica_groups"] = {v.name: alone for v in variables if not v.is_parameter}
    return Options(
        device_iterations=shape.steps // shape.accumulation,
        replicas=shape.replicas,
        output_mode="final" if last_results_only(model, kind, shape) else "all",
        locations=locations(_keywords(settings, pipelined=ipus is not None)),
        recompute_here=False,
        skipped_sources=(torch.__path__[0], *MACHINERY),
        **more,
    )


def last_results_only(model: Any, kind: Kind, shape: CallShape) -> bool:
    """Whether the results of the last micro-batch are all that is sent to the host."""
    wanted = bool(state_of(model).settings.accumulate_outfeed)
    return wanted and shape.pipelined and kind != "predict"


def locations(keywords: Mapping[str, Any]) -> Locations:
    """The locations of variables: off the chip or on it."""

    def where(*names: str) -> Location:
        return Location(off_chip=any(keywords.get(name) for name in names))

    return Locations(
        weights=where("offload_weights"),
        optimizer_state=where("offload_weight_update_variables"),
        accumulators=where("offload_gradient_accumulation_buffers"),
    )


def reduced_loss(model: Any, shape: CallShape) -> Callable[[Tensor], Tensor]:
    """Scale the loss of a micro-batch before it is differentiated.

    The core adds gradients up, or keeps their mean over micro-batches and replicas; Keras'
    extension always adds over replicas.
    """
    match state_of(model).settings.reduction:
        case GradientAccumulationReductionMethod.SUM:
            return lambda loss: loss
        case GradientAccumulationReductionMethod.MEAN:
            return lambda loss: loss / shape.accumulation
        case _:
            return lambda loss: loss * shape.replicas


def accumulator_dtypes(
    model: Any, pipelined: bool, variables: Sequence[StepVariable]
) -> dict[str, torch.dtype]:
    """In which dtype the gradients of each trained variable are summed.

    Raises:
        ValueError: the function that the user gave returns none.
    """
    keywords = _keywords(state_of(model).settings, pipelined=pipelined)
    wanted: Any = keywords.get("gradient_accumulation_dtype" if pipelined else "dtype")
    dtypes = {}
    for variable in variables:
        if variable.role != "trained":
            continue
        choice = wanted(variable.variable) if _is_function(wanted) else wanted
        if choice is None:
            dtypes[variable.name] = torch.promote_types(torch.float32, variable.tensor.dtype)
        elif isinstance(choice, torch.dtype):
            dtypes[variable.name] = choice
        else:
            dtypes[variable.name] = backend_core.to_torch_dtype(choice)
        if not dtypes[variable.name].is_floating_point:
            raise ValueError(
                f"gradients of {variable.variable.path} cannot be summed in "
                f"{dtypes[variable.name]}: choose a dtype of floating point"
            )
    return dtypes


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.dtype)


def _keywords(settings: Any, *, pipelined: bool) -> Mapping[str, Any]:
    keywords: Mapping[str, Any] = (
        settings.pipelining_keywords if pipelined else settings.accumulation_keywords
    )
    return keywords
