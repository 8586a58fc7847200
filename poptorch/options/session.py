"""List the settings of the lower layers, with types and effects."""

from collections.abc import Iterable, Mapping
from typing import Any

from poptorch._logging import logger
from poptorch.errors import createPoptorchError
from poptorch.options.effects import Effect

_BOOLS = """
    aliasZeroCopy automaticLossScalingSettings.enabled
    batchSerializationSettings.concatOnExecutionPhaseChange
    batchSerializationSettings.concatOnPipelineStageChange
    batchSerializationSettings.concatOnVirtualGraphChange compileEngine constantWeights
    decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams
    disableOptimizerStateTensorStreams dotOpNames enableDistributedReplicatedGraphs
    enableEngineCaching enableExplicitIR enableExplicitMainLoops enableFloatingPointChecks
    enableFullyConnectedPass enableGradientAccumulation enableInplaceAmbiguityChecking
    enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax enableOutlining
    enableOutliningCopyCostPruning enablePipelining enablePrefetchDatastreams
    enableReplicatedGraphs enableSerializedMatmuls enableStableNorm enableStochasticRounding
    enableSupportedDataTypeCasting ensureFp32LossScaleTensor explicitRecomputation
    exportPoplarComputationGraph exportPoplarVertexGraph groupHostSync
    groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter opxAliasChecking
    opxModifyChecking rearrangeAnchorsOnHost rearrangeStreamsOnHost
    replicatedCollectivesSettings.mergeAllReduceCollectives
    replicatedCollectivesSettings.prepareScheduleForMergingCollectives
    scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs strictOpVersions useHostCopyOps
    auto_round_num_ipus broadcast_buffers separate_backward_phase serial_phases_execution use_model
"""
_INTEGERS = """
    accumulateOuterFragmentSettings.schedule accumulationAndReplicationReductionType
    accumulationFactor autoRecomputation autodiffSettings.stitchStrategy
    automaticLossScalingSettings.gradientTensorTrackingMethod
    automaticLossScalingSettings.updatePeriod batchSerializationSettings.batchSchedule
    batchSerializationSettings.factor batchSerializationSettings.method
    batchSerializationSettings.transformContext cacheSizeLimit compilationProgressTotal
    defaultBufferingDepth
    defaultPrefetchBufferingDepth executionPhaseSettings.phases executionPhaseSettings.stages
    finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor looseThresholdAtPeak
    meanAccumulationAndReplicationReductionStrategy mergeVarUpdate mergeVarUpdateMemThreshold
    numIOTiles partialsChunk patterns_level subgraphCopyingStrategy swapLimitScheduler
    syntheticDataMode transitiveClosureOptimizationThreshold virtualGraphMode
    accumulation_and_replication_reduction_type connection_type device_iterations
    distributed_process_id execution_mode gradient_accumulation input_cgt input_group_size ipu_id
    ipu_version
    max_repeat_logs num_distributed_processes output_mode output_return_period random_seed
    replication_factor sync_pattern tensors_liveness
"""
_FLOATS = """
    automaticLossScalingSettings.binEdgeLocation
    automaticLossScalingSettings.thresholdUpperCountProportion outlineSequenceBreakCost
    outlineThreshold timeLimitScheduler
"""
_STRINGS = """
    cachePath customCodeletCompileFlags kahnTieBreaker logDir partialsTypeMatMuls
    saveInitializersToFile serializedPoprithmsShiftGraphsDir log_dir model_name
"""
_LISTS = """
    accumulateOuterFragmentSettings.excludedVirtualGraphs customCodelets dotChecks
    hardwareInstrumentations updatableNamedBuffers
"""
_DICTIONARIES = """
    convolutionOptions engineOptions gclOptions lstmOptions matmulOptions patterns reportOptions
    anchored_tensors available_memory_proportion ipuof_configs location_accumulator
    location_activation location_optimizer location_weight
"""

_KEYS = {
    "bool": frozenset(_BOOLS.split()),
    "uint64": frozenset(_INTEGERS.split()),
    "floating point": frozenset(_FLOATS.split()),
    "string": frozenset(_STRINGS.split()),
    "set / vector": frozenset(_LISTS.split()),
    "map": frozenset(_DICTIONARIES.split()),
}
_ENUMERATIONS = {  # options that are set by the number of an enumeration's member
    "accumulateOuterFragmentSettings.schedule": ("AccumulateOuterFragmentSchedule", range(4)),
    "autoRecomputation": ("RecomputationType", range(5)),
    "batchSerializationSettings.batchSchedule": ("BatchSerializationBatchSchedule", range(4)),
    "subgraphCopyingStrategy": ("SubgraphCopyingStrategy", range(2)),
    "syntheticDataMode": ("SyntheticDataMode", range(3)),
    "virtualGraphMode": ("VirtualGraphMode", range(4)),
}
_OF_TYPES = ((bool, "bool"), (int, "uint64"), (float, "floating point"), (str, "string"))

_EFFECTS = {
    Effect.COMPUTES: """
        automaticLossScalingSettings.binEdgeLocation automaticLossScalingSettings.enabled
        automaticLossScalingSettings.gradientTensorTrackingMethod
        automaticLossScalingSettings.thresholdUpperCountProportion
        automaticLossScalingSettings.updatePeriod convolutionOptions enableFloatingPointChecks
        enableStableNorm enableStochasticRounding partialsChunk partialsTypeMatMuls
        syntheticDataMode updatableNamedBuffers
    """,
    Effect.MACHINE: """
        autoRecomputation enableOutlining engineOptions instrumentWithHardwareCycleCounter
        numIOTiles
    """,
    Effect.HOST: "cachePath cacheSizeLimit enableEngineCaching",
}
_EFFECT_OF = {key: effect for effect, keys in _EFFECTS.items() for key in keys.split()}


def popart_keys() -> tuple[str, ...]:
    """The keys that `_Popart.set` is for, sorted."""
    names = {key for keys in _KEYS.values() for key in keys}
    return tuple(sorted(key for key in names if "_" not in key))


def effect_of_key(key: str) -> Effect:
    """The effect of a key of `_Popart.set`."""
    return _EFFECT_OF.get(key, Effect.RECORDED)


def check_session(options: Mapping[str, Any]) -> None:
    """Check every key and type of `Options.toDict()`, and log each at level DEBUG.

    Args:
        options: values by name.

    Raises:
        poptorch.Error: for an unknown key, a value of a type that no option has, or a number that
            no member of an enumeration has.
    """
    for name, value in options.items():
        kind = _kind(name, value)
        if name not in _KEYS[kind] and not (kind == "uint64" and name in _KEYS["floating point"]):
            raise createPoptorchError(f"Unknown {kind} option {name}{_expected(name)}", id="option")
        if name in _ENUMERATIONS:
            _check_member(name, value)
        for line in _lines(name, value):
            logger.debug("poptorch.Options %s", line)
    if "use_model" in options:
        state = "Enabled" if options["use_model"] else "Disabled"
        logger.info("From the user configuration: Ipu model: %s", state)


def _kind(name: str, value: Any) -> str:
    for type_, kind in _OF_TYPES:
        if isinstance(value, type_):
            return kind
    if isinstance(value, dict):
        return "map"
    if isinstance(value, set | frozenset | list | tuple) and all(
        isinstance(item, str | int) for item in value
    ):
        return "set / vector"
    raise createPoptorchError(
        f"Unknown value type {type(value).__name__} for option {name}: use bool, int, float, str, "
        "a list or set of int or str, or a dict of str to str",
        id="option",
    )


def _check_member(name: str, value: int) -> None:
    enumeration, members = _ENUMERATIONS[name]
    if value not in members:
        raise createPoptorchError(
            f"Value for {enumeration} out of range: {name} is {int(value)}, and the members of "
            f"popart.{enumeration} have the numbers {members[0]} to {members[-1]}",
            id="option",
        )


def _expected(name: str) -> str:
    kinds = [kind for kind, names in _KEYS.items() if name in names]
    return f": its values are of kind {kinds[0]}" if kinds else ""


def _lines(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        return [f"set {name}[{key}] to {_text(item)}" for key, item in value.items()]
    if isinstance(value, set | frozenset | list | tuple):
        return [f"added {item} to {name}" for item in value]
    return [f"set {name} to value {_text(value)}"]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)
