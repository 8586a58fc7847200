"""Take options over: freeze the user's, and make the executor's own from them."""

import os
from typing import Any

import torch

from poptorch._logging import limit_repeats, logger
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import createPoptorchError
from poptorch.hardware import ipu_model_from_environment
from poptorch.options.general import Options
from poptorch.strategies import PipelinedExecution

_OFFLINE = "IPU_DYNAMO_OFFLINE"  # environment variable: executors only compile


def given_options(options: Any) -> Options:
    """The options of a call's argument: defaults for None and the like.

    Args:
        options: those that a user passed.

    Raises:
        poptorch.Error: for anything else than options.
    """
    if not options:
        return Options()
    if not isinstance(options, Options):
        hint = ""
        if isinstance(options, torch.optim.Optimizer):
            hint = ": give the optimizer by name, optimizer=..."
        elif hasattr(options, "to_options"):  # an IPUConfig
            hint = ": give what its to_options() returns"
        raise createPoptorchError(
            f"Invalid type: 'options' is of type {type(options)!r} but must be "
            f"poptorch.Options{hint}",
            id="option",
        )
    return options


def adopt(options: Any, *, training: bool, optimizer: Any = None) -> Options:
    """Freeze the user's options and return the executor's own, complete and frozen.

    From here on the compiler repeats a message of the log as often as the options say.

    Args:
        options: those that the user passed to `trainingModel` or `inferenceModel`.
        training: the kind of executor; decides the output mode where none was chosen.
        optimizer: decides the mean reduction strategy where none was chosen.

    Raises:
        poptorch.Error: for options that no executor of this kind can have.
    """
    given = given_options(options)
    own = given.clone()
    if os.environ.get(_OFFLINE) and not own.exists("ipu_version"):
        own.useOfflineIpuTarget()
    check(own, training=training)
    given._freeze()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if training else OutputMode.All)
    if training:
        own.Training.set(
            meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy(own, optimizer)
        )
    own._freeze()
    limit_repeats(own.max_repeat_logs)
    return own


def check(options: Options, *, training: bool) -> None:
    """Refuse options that no executor can follow.

    Raises:
        poptorch.Error: for a count below 1, an inference that accumulates gradients, or an
            offline target with the IPU Model selected.
    """
    counts = {
        "deviceIterations": options.device_iterations,
        "replicationFactor": options.replication_factor,
        "Training.gradientAccumulation": options.Training.gradient_accumulation,
    }
    for name, count in counts.items():
        if count < 1:
            raise createPoptorchError(
                f"poptorch.Options().{name} must be at least 1, got {count}", id="option"
            )
    if not training and counts["Training.gradientAccumulation"] != 1:
        hint = (
            " Use poptorch.Options().deviceIterations to process a sufficient number of batches "
            "each run for pipelined execution instead."
            if type(options._execution_strategy) is PipelinedExecution
            else ""
        )
        raise createPoptorchError(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its "
            f"default value (1) when running a poptorch.inferenceModel().{hint}",
            id="option",
        )
    if options.exists("ipu_version") and uses_ipu_model(options):
        raise createPoptorchError(
            "useOfflineIpuTarget() cannot be used with the IPU Model: call useIpuModel(False), or "
            "unset POPTORCH_IPU_MODEL and POPTORCH_SMALL_IPU_MODEL",
            id="option",
        )


def uses_ipu_model(options: Options) -> bool:
    """Whether the IPU Model is selected, by `useIpuModel` or else by the environment.

    Args:
        options: of an executor.
    """
    if options.exists("use_model"):
        return bool(options.use_model)
    return ipu_model_from_environment()


def mean_reduction_strategy(options: Options, optimizer: Any) -> MeanReductionStrategy:
    """When averages of gradients divide.

    The user's choice; but `Running` for an optimizer that accumulates in half precision in an
    accumulator of its own, where another one could overflow.

    Args:
        options: of an executor that trains.
        optimizer: of the executor; it may have no `accum_type`.
    """
    chosen: MeanReductionStrategy = options.Training.meanAccumulationAndReplicationReductionStrategy
    if not _accumulates_in_half(optimizer) or chosen == MeanReductionStrategy.Running:
        return chosen
    if options.Training._mean_strategy_given:
        logger.warning(
            "The optimizer accumulates gradients in float16: its mean reduction strategy is "
            "Running, and not %s, which was chosen",
            MeanReductionStrategy(chosen).name,
        )
    return MeanReductionStrategy.Running


def _accumulates_in_half(optimizer: Any) -> bool:
    half = getattr(optimizer, "accum_type", None) == torch.float16
    return half and not getattr(optimizer, "use_combined_accum", False)
