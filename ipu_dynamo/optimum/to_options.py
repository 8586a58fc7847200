"""Translate a configuration to PopTorch's options. Only this file uses poptorch."""

from typing import TYPE_CHECKING, Any

import torch

from ipu_dynamo.optimum.incompatible import IncompatibleIPUConfigError

if TYPE_CHECKING:
    import poptorch
    from ipu_dynamo.optimum.config import IPUConfig

_GENERATIONS = (2, 21)  # that Optimum Graphcore runs on
_OUTPUT_MODES = {"all": "All", "sum": "Sum", "final": "Final", "default": "Default"}
# PopART's numbers of AccumulateOuterFragmentSchedule and SubgraphCopyingStrategy
OVERLAP_MEMORY_OPTIMIZED, JUST_IN_TIME = 3, 1
_PATTERNS = {
    "TiedGather": True,
    "TiedGatherAccumulate": True,
    "UpdateInplacePrioritiesForIpu": True,
}
_ENGINE = {"opt.useAutoloader": "true", "target.syncReplicasIndependently": "true"}
# Hints to PopART, which are kept and change nothing here.
_HINTS: dict[str, Any] = {
    "disableGradAccumulationTensorStreams": True,
    "accumulateOuterFragmentSettings.schedule": OVERLAP_MEMORY_OPTIMIZED,
    "accumulateOuterFragmentSettings.excludedVirtualGraphs": ["0"],
    "outlineThreshold": 10.0,
    "subgraphCopyingStrategy": JUST_IN_TIME,
    "scheduleNonWeightUpdateGradientConsumersEarly": True,
    "engineOptions": _ENGINE,
}


def to_options(config: "IPUConfig", *, inference: bool, compile_only: bool) -> "poptorch.Options":
    """The options of an executor, as Optimum Graphcore sets them.

    Args:
        config: with plain values, none by type of POD.

    Raises:
        RuntimeError: the machine is configured as another generation, and is not only compiled for.
        IncompatibleIPUConfigError: fewer memory proportions than IPUs.

    Source: Optimum Graphcore 0.7.1, `IPUConfig._to_options`.
    """
    import poptorch
    from poptorch.hardware import ipu_generation

    if not compile_only and (generation := ipu_generation()) not in _GENERATIONS:
        raise RuntimeError(
            f"the machine is configured as generation {generation} of the IPU, and Optimum "
            f"Graphcore runs on {' and '.join(map(str, _GENERATIONS))}: set "
            "POPTORCH_IPU_MODEL_VERSION to another, or pass compile_only=True"
        )
    twin = "inference_" if inference else ""
    replicas = getattr(config, f"{twin}replication_factor")
    options = poptorch.Options()
    options.autoRoundNumIPUs(True)
    options.replicationFactor(replicas)
    options.deviceIterations(getattr(config, f"{twin}device_iterations"))
    mode = "All" if inference else _OUTPUT_MODES[config.output_mode]
    options.outputMode(poptorch.OutputMode[mode])
    if not inference:
        training = options.Training
        training.gradientAccumulation(config.gradient_accumulation_steps)
        training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
        if config.auto_loss_scaling:
            training.setAutomaticLossScaling(True)
    if config.seed is not None:
        options.randomSeed(int(config.seed))
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings()
        .useOnChipStorage(not config.optimizer_state_offchip)
        .useReplicatedTensorSharding(bool(config.replicated_tensor_sharding and replicas > 1))
    )
    options.setExecutionStrategy(_strategy(config, inference=inference))
    if compile_only:
        options.useOfflineIpuTarget()
    options.setAvailableMemoryProportion(
        {f"IPU{ipu}": share for ipu, share in enumerate(memory_shares(config, twin))}
    )
    if config.executable_cache_dir and config.executable_cache_dir != "disabled":
        options.enableExecutableCaching(config.executable_cache_dir)
    options.Precision.enableStochasticRounding(not inference)
    if config.enable_half_partials:
        options.Precision.setPartialsType(torch.float16)
    for name, value in _HINTS.items():
        options._Popart.set(name, dict(value) if isinstance(value, dict) else value)
    options._Popart.setPatterns(dict(_PATTERNS))
    if inference and config.explicit_ir_inference:
        options._Popart.set("enableExplicitIR", True)
    return options


def memory_shares(config: "IPUConfig", twin: str) -> list[float]:
    """The memory proportion of each IPU of a replica; one alone is repeated.

    Raises:
        IncompatibleIPUConfigError: a list that was assigned later has too few.
    """
    proportion = getattr(config, f"{twin}matmul_proportion")
    ipus = getattr(config, f"{twin}ipus_per_replica")
    shares = proportion if isinstance(proportion, list) else [proportion]
    if len(shares) == 1:
        shares = shares * ipus
    if len(shares) < ipus:
        raise IncompatibleIPUConfigError(
            f"{twin}matmul_proportion={shares} has {len(shares)} entries, and "
            f"{twin}ipus_per_replica={ipus} IPUs need one each"
        )
    return [float(share) for share in shares[:ipus]]


def _strategy(config: "IPUConfig", *, inference: bool) -> Any:
    """The execution strategy; of inference, one that runs sharded where it cannot fill itself."""
    import poptorch

    automatic = poptorch.AutoStage.AutoIncrement
    if inference and config.sharded_execution_for_inference:
        return poptorch.ShardedExecution(automatic)
    strategy = poptorch.PipelinedExecution(automatic)
    strategy._sharded_if_short = inference
    return strategy
