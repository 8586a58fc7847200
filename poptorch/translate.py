"""Translate PopTorch's options into those of the core."""

import functools
import os
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from ipu_dynamo import options as core
from ipu_dynamo.options.loss_scaling import AutomaticLossScaling, Watched
from poptorch._logging import logger
from poptorch.enums import (
    CommGroupType,
    Liveness,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.options.engine import ALLOW_OUT_OF_MEMORY, switched_on
from poptorch.options.host import default_location_excludes
from poptorch.processes import mesh_of

_NOT_SHARDED = 8191  # elements of the largest tensor that is not sharded, unless another is set
_DEVICES = "IPU_DYNAMO_DEVICES"  # environment variable: torch devices of the IPUs, by commas
_OUTPUTS: dict[int, core.OutputMode] = {
    OutputMode.Final: "final",
    OutputMode.EveryN: "every",
    OutputMode.All: "all",
    OutputMode.Sum: "sum",
    OutputMode.Default: "default",
}
_SYNC_PATTERNS: dict[int, core.SyncPattern] = {
    SyncPattern.Full: "full",
    SyncPattern.SinglePipeline: "single_pipeline",
    SyncPattern.ReplicaAndLadder: "replica_and_ladder",
}
_LIVENESS: dict[str, core.Liveness] = {
    Liveness.AlwaysLive.name: "always_live",
    Liveness.OffChipAfterFwd.name: "off_chip_after_fwd",
    Liveness.OffChipAfterFwdNoOverlap.name: "off_chip_after_fwd_no_overlap",
    Liveness.OffChipAfterEachPhase.name: "off_chip_after_each_phase",
}
_STRATEGIES: dict[int, Any] = {
    MeanReductionStrategy.Running: "running",
    MeanReductionStrategy.Post: "post",
    MeanReductionStrategy.PostAndLoss: "post_and_loss",
}
_ALS = "automaticLossScalingSettings."  # before the names of its settings
_WATCHED: dict[int, Watched] = {0: "all", 1: "products"}  # gradientTensorTrackingMethod
_RECOMPUTATION: dict[int | None, core.Recomputation] = {  # by PopART's numbers
    None: "auto",
    0: "off",
    1: "all",  # Standard: what to keep is chosen, or marked
    2: "auto",  # NormOnly
    3: "stages",  # Pipeline
    4: "all",  # RecomputeAll: marks count here, too
}


def core_options(
    options: Options,
    *,
    training: bool,
    loss_scale: float = 1.0,
    loss_scale_is_variable: bool = False,
    combined_accumulator: bool = False,
    saved: bool = False,
) -> core.Options:
    """The core's options for an executor.

    Args:
        options: complete, as `poptorch.options.adopt` makes them.
        loss_scale: the factor on the loss in the backward pass.
        loss_scale_is_variable: whether `setOptimizer` may change it.
        combined_accumulator: the optimizer's state is in the gradients' accumulators.
        saved: its program comes from a file.

    Raises:
        poptorch.Error: training has several processes and no process group, or the return period
            does not fit the device iterations.
        OptionError: the environment names devices or a mesh that are not there.
    """
    _check_period(options)
    mesh = mesh_of(options, training=training, saved=saved)
    reduction = options.Training.accumulation_and_replication_reduction_type
    strategy = options.Training.meanAccumulationAndReplicationReductionStrategy
    settings = options._Popart.options
    convolutions = settings.get("convolutionOptions", {})
    return core.Options(
        device_iterations=options.device_iterations,
        gradient_accumulation=options.Training.gradient_accumulation,
        replicas=options.replication_factor
        * (1 if mesh is None else options.Distributed.numProcesses),
        mesh=mesh,
        input_group_size=options.input_group_size,
        input_groups_orthogonal=options.input_cgt == CommGroupType.Orthogonal,
        output_mode=_OUTPUTS[options.output_mode],
        return_period=options.output_return_period,
        reduction="sum" if reduction == ReductionType.Sum else "mean",
        mean_strategy=_STRATEGIES[strategy],
        strategy=core_strategy(options),
        locations=core_locations(options, combined_accumulator=combined_accumulator),
        io_tiles=core_io_tiles(options),
        memory_proportion=options.available_memory_proportion or core.Options().memory_proportion,
        sync_pattern=_SYNC_PATTERNS[options.sync_pattern],
        recompute=_RECOMPUTATION[settings.get("autoRecomputation")],
        recompute_here=False,
        outline="auto" if settings.get("enableOutlining", True) else False,
        narrow=True,
        module_names=options._module_namescope_enabled,
        skipped_sources=_skipped_sources(options._source_location_excludes),
        synthetic_data=bool(settings.get("syntheticDataMode", 0)),
        loss_scale=loss_scale,
        loss_scale_is_variable=loss_scale_is_variable,
        automatic_loss_scaling=automatic_loss_scaling(options) if training else None,
        partials=settings.get("partialsTypeMatMuls", "float"),
        convolution_partials=convolutions.get("partialsType", "float"),
        partials_chunk=settings.get("partialsChunk", 64),
        stable_norm=settings.get("enableStableNorm", False),
        stochastic_rounding=settings.get("enableStochasticRounding", False),
        floating_point_exceptions=settings.get("enableFloatingPointChecks", False),
        devices=_devices(),
        enforce_memory="" if ALLOW_OUT_OF_MEMORY in switched_on(options) else None,
        progress=options._show_progress_bar,
        program_cache=settings.get("cachePath") if settings.get("enableEngineCaching") else None,
        program_cache_limit=settings.get("cacheSizeLimit", core.Options().program_cache_limit),
        seed=options.random_seed if options.exists("random_seed") else None,
    )


def _skipped_sources(excludes: list[str]) -> tuple[str, ...] | None:
    """The files whose lines are not the user's; None: those by default."""
    return None if excludes == default_location_excludes() else tuple(excludes)


def core_strategy(options: Options) -> core.Strategy:
    """The execution strategy."""
    plain = options._execution_strategy.core_strategy()
    stages = tuple(core.StageSpec(blocks, ipu) for blocks, ipu in plain["stages"])
    if "phases" in plain:
        ends = list(accumulate(plain["phases"], initial=0))
        return core.Strategy(
            kind=plain["kind"],
            phases=tuple(stages[begin:end] for begin, end in pairwise(ends)),
            liveness=_LIVENESS[plain["liveness"]],
            separate_backward_phase=plain["separate_backward_phase"],
        )
    return core.Strategy(
        kind=plain["kind"],
        auto_stage=plain["auto_stage"],
        stages=stages,
        weights_on_one_ipu=True,
        sharded_if_short=options._execution_strategy._sharded_if_short,
    )


def core_locations(options: Options, *, combined_accumulator: bool = False) -> core.Locations:
    """The memory of tensors: the user's setting. By default off the chip in phases, else on it.

    Accumulators and activations differ between replicas, so they are never in shards. The velocity
    of a combined accumulator is as the accumulators are set.
    """
    phased = core_strategy(options).phased
    given = {
        kind: options.TensorLocations.toDict().get(f"location_{kind}", {})
        for kind in ("weight", "optimizer", "accumulator", "activation")
    }
    if combined_accumulator:
        given["optimizer"] = given["accumulator"]

    def location(kind: str) -> core.Location:
        settings = given[kind]
        on_chip = bool(settings.get("onChip", not phased))
        away = core.Location(
            not on_chip,
            settings.get("minElementsForOffChip", 0),
            io_tiles_to_load=bool(settings.get("useIOTilesToLoad")),
            io_tiles_to_store=bool(settings.get("useIOTilesToStore")),
        )
        if not settings.get("useReplicatedTensorSharding"):
            return away
        if kind in ("accumulator", "activation"):
            _say_not_sharded(kind)
            return away
        above = settings.get("minElementsForReplicatedTensorSharding", _NOT_SHARDED)
        return replace(away, sharded=True, min_sharded=above + 1)

    return core.Locations(*map(location, given))


@functools.cache  # once for each in a process
def _say_not_sharded(kind: str) -> None:
    logger.warning(
        "useReplicatedTensorSharding is recorded only for %ss: these differ between replicas, and "
        "each replica keeps its own whole",
        kind,
    )


def core_io_tiles(options: Options) -> int:
    """Tiles of each IPU for IO: the user's setting, or its key of the lower layers, or 0."""
    tiles: int = options.TensorLocations.toDict().get("numIOTiles", 0)
    return tiles or options._Popart.options.get("numIOTiles", 0)


def batching_factors(options: Options) -> tuple[int, str]:
    """Micro-batches of each input in one call, and the product that makes this number, as text."""
    iterations = options.device_iterations
    accumulation = options.Training.gradient_accumulation
    replicas, group = options.replication_factor, options.input_group_size
    return (
        iterations * accumulation * (replicas // group),
        f"device iterations ({iterations}) x replication factor ({replicas}) / input group size "
        f"({group}) x gradient accumulation ({accumulation})",
    )


def _devices() -> list[str] | None:
    """The torch devices that the environment names."""
    names = os.environ.get(_DEVICES, "")
    return [name.strip() for name in names.split(",")] if names else None


def _check_period(options: Options) -> None:
    if options.output_mode != OutputMode.EveryN:
        return
    period, iterations = options.output_return_period, options.device_iterations
    got = f"(got a period of {period} for {iterations} device iterations)"
    if period > iterations:
        raise createPoptorchError(
            f"Return period must be <= to the number of batches per step {got}", id="option"
        )
    if iterations % period:
        raise createPoptorchError(
            f"Return period must be a factor of the number of batches per step {got}", id="option"
        )


def automatic_loss_scaling(options: Options) -> AutomaticLossScaling | None:
    """How the loss scale follows the gradients; None: it does not.

    Raises:
        poptorch.Error: the gradients to track are to be named, or a setting has no meaning.
    """
    settings = options._Popart.options
    if not settings.get(f"{_ALS}enabled"):
        return None
    method = settings.get(f"{_ALS}gradientTensorTrackingMethod", 0)
    if method not in _WATCHED:
        raise createPoptorchError(
            f"{_ALS}gradientTensorTrackingMethod is {method}: choose 0, all gradients, or 1, those "
            "of matrix products and convolutions",
            id="option",
        )
    return AutomaticLossScaling(
        edge=settings.get(f"{_ALS}binEdgeLocation", AutomaticLossScaling().edge),
        share=settings.get(f"{_ALS}thresholdUpperCountProportion", AutomaticLossScaling().share),
        period=settings.get(f"{_ALS}updatePeriod", 1),
        watch=_WATCHED[method],
    )
