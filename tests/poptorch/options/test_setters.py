"""Check what every setter stores, what it refuses, and that it can be chained."""

import os

import pytest
import torch

import poptorch
from poptorch import enums

STRATEGY = poptorch.ShardedExecution()
LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)

# (accessor, keyword arguments, what of toDict() is new or different afterwards)
STORED = [
    ("autoRoundNumIPUs", {"auto_round_num_ipus": True}, {"auto_round_num_ipus": True}),
    ("broadcastBuffers", {"broadcast_buffers": False}, {"broadcast_buffers": False}),
    ("connectionType", {"connection_type": enums.ConnectionType.Never}, {"connection_type": 2}),
    ("deviceIterations", {"device_iterations": 7}, {"device_iterations": 7}),
    (
        "enableExecutableCaching",
        {"path": "cache"},
        {"cachePath": "cache", "enableEngineCaching": True},
    ),
    ("enableExecutableCaching", {"path": None}, {"enableEngineCaching": False}),
    ("enableStableNorm", {"enabled": True}, {"enableStableNorm": True}),
    ("enableSyntheticData", {"enabled": True}, {"syntheticDataMode": 2}),
    ("enableSyntheticData", {"enabled": False}, {"syntheticDataMode": 0}),
    (
        "enableProfiling",
        {"profile_dir": "reports"},
        {
            "engineOptions": {
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": "reports",
                "autoReport.all": "true",
            }
        },
    ),
    ("logCycleCount", {"log_cycle_count": True}, {"instrumentWithHardwareCycleCounter": True}),
    ("logDir", {"log_dir": "logs"}, {"log_dir": "logs"}),
    ("maxRepeatLogs", {"max_lines": 9}, {"max_repeat_logs": 9}),
    ("maxRepeatLogs", {"max_lines": None}, {"max_repeat_logs": 2**64 - 1}),
    ("modelName", {"name": "net"}, {"model_name": "net"}),
    (
        "outputMode",
        {"output_mode": enums.OutputMode.EveryN, "output_return_period": 3},
        {"output_mode": 1, "output_return_period": 3},
    ),
    (
        "outputMode",
        {"output_mode": enums.OutputMode.Sum, "output_return_period": 3},
        {"output_mode": 3},
    ),
    ("randomSeed", {"random_seed": 5}, {"random_seed": 5}),
    ("replicationFactor", {"replication_factor": 4}, {"replication_factor": 4}),
    (
        "setAvailableMemoryProportion",
        {"available_memory_proportion": {"IPU0": 0.5, "IPU12": 1}},
        {"available_memory_proportion": {0: 0.5, 12: 1}},
    ),
    ("setExecutionStrategy", {"strategy": STRATEGY}, {"execution_mode": 1}),
    ("syncPattern", {"sync_pattern": enums.SyncPattern.ReplicaAndLadder}, {"sync_pattern": 2}),
    ("updatableNamedBuffers", {"buffers": ["a"]}, {"updatableNamedBuffers": ["a"]}),
    ("useIpuId", {"ipu_id": 3}, {"ipu_id": 3}),
    ("useIpuModel", {"use_model": True}, {"use_model": True}),
    ("useOfflineIpuTarget", {"ipu_version": 21}, {"ipu_version": 21, "connection_type": 2}),
    (
        "Training.accumulationAndReplicationReductionType",
        {"reduction_type": enums.ReductionType.Sum},
        {"accumulation_and_replication_reduction_type": enums.ReductionType.Sum},
    ),
    ("Training.gradientAccumulation", {"gradient_accumulation": 8}, {"gradient_accumulation": 8}),
    (
        "Training.setAutomaticLossScaling",
        {"enabled": True},
        {"automaticLossScalingSettings.enabled": True},
    ),
    (
        "Training.setConvolutionDithering",
        {"enabled": True},
        {"convolutionOptions": {"enableConvDithering": "true"}},
    ),
    (
        "Training.setMeanAccumulationAndReplicationReductionStrategy",
        {"mean_reduction_strategy": enums.MeanReductionStrategy.Running},
        {"meanAccumulationAndReplicationReductionStrategy": enums.MeanReductionStrategy.Running},
    ),
    (
        "Precision.enableFloatingPointExceptions",
        {"enabled": True},
        {"enableFloatingPointChecks": True},
    ),
    ("Precision.enableStochasticRounding", {"enabled": True}, {"enableStochasticRounding": True}),
    (
        "Precision.setPartialsType",
        {"dtype": torch.half},
        {"partialsTypeMatMuls": "half", "convolutionOptions": {"partialsType": "half"}},
    ),
    (
        "Precision.halfFloatCasting",
        {"half_float_casting": enums.HalfFloatCastingBehavior.HalfUpcastToFloat},
        {},
    ),
    ("Precision.runningStatisticsAlwaysFloat", {"value": True}, {}),
    (
        "Distributed.configureProcessId",
        {"process_id": 1, "num_processes": 2},
        {"distributed_process_id": 1, "num_distributed_processes": 2},
    ),
    ("Distributed.disable", {}, {}),
    ("Jit.traceModel", {"trace_model": False}, {}),
    ("TensorLocations.numIOTiles", {"num_tiles": 64}, {"numIOTiles": 64}),
    (
        "TensorLocations.setAccumulatorLocation",
        {"location": LOCATION},
        {"location_accumulator": {"onChip": 0}},
    ),
    (
        "TensorLocations.setActivationLocation",
        {"location": LOCATION},
        {"location_activation": {"onChip": 0}},
    ),
    (
        "TensorLocations.setOptimizerLocation",
        {"location": LOCATION},
        {"location_optimizer": {"onChip": 0}},
    ),
    (
        "TensorLocations.setWeightLocation",
        {"location": LOCATION},
        {"location_weight": {"onChip": 0}},
    ),
    ("_Popart.set", {"key": "enableOutlining", "value": False}, {"enableOutlining": False}),
    (
        "_Popart.setEngineOptions",
        {"engine_options": {"a": "b"}},
        {"engineOptions": {"a": "b"}},
    ),
    (
        "_Popart.setPatterns",
        {"patterns": {"PadSum": True}, "level": 0},
        {"patterns": {"PadSum": True}, "patterns_level": 0},
    ),
]


def reach(options, accessor):
    """The object that a setter is called on, and the setter."""
    *path, name = accessor.split(".")
    owner = options
    for part in path:
        owner = getattr(owner, part)
    return owner, getattr(owner, name)


def values(options):
    complete = options.clone()
    if complete.defaultOutputMode():
        complete.outputMode(enums.OutputMode.Final)
    return complete.toDict()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("POPTORCH", "POPLAR", "OMPI")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("accessor", "arguments", "stored"), STORED)
def test_a_setter_stores_its_values_and_chains(accessor, arguments, stored):
    options = poptorch.Options()
    owner, setter = reach(options, accessor)
    before = values(options)
    assert setter(**arguments) is owner
    after = values(options)
    default = object()
    assert {k: v for k, v in after.items() if before.get(k, default) != v} == stored


@pytest.mark.parametrize(
    ("accessor", "arguments", "attribute", "expected"),
    [
        ("appendToLocationExcludes", ("mine",), "_source_location_excludes", "mine"),
        ("sourceLocationExcludes", (["mine"],), "_source_location_excludes", "mine"),
    ],
)
def test_location_excludes(accessor, arguments, attribute, expected):
    options = poptorch.Options()
    assert len(options._source_location_excludes) == 3
    owner, setter = reach(options, accessor)
    assert setter(*arguments) is owner
    assert options._source_location_excludes[-1] == expected
    assert len(options._source_location_excludes) == (4 if accessor.startswith("append") else 1)
    assert len(poptorch.Options()._source_location_excludes) == 3


def test_flags_that_are_no_options():
    options = poptorch.Options()
    assert options.relaxOptimizerAttributesChecks(relax=True) is options
    assert options.showCompilationProgressBar(show=False) is options
    assert options.disableModuleNamescope() is options
    assert options._relax_optimizer_checks
    assert not options._show_progress_bar
    assert not options._module_namescope_enabled


LOCATIONS = {
    "minElementsForOffChip": ("min_elements", 5, "minElementsForOffChip"),
    "minElementsForReplicatedTensorSharding": (
        "min_elements",
        7,
        "minElementsForReplicatedTensorSharding",
    ),
    "useOnChipStorage": ("use", False, "onChip"),
    "useReplicatedTensorSharding": ("use", True, "useReplicatedTensorSharding"),
    "useIOTilesToLoad": ("use", True, "useIOTilesToLoad"),
    "useIOTilesToStore": ("use", False, "useIOTilesToStore"),
}


@pytest.mark.parametrize("name", LOCATIONS)
def test_location_settings(name):
    argument, value, stored = LOCATIONS[name]
    settings = poptorch.TensorLocationSettings()
    assert settings.toDict() == {}
    assert getattr(settings, name)(**{argument: value}) is settings
    assert settings.toDict() == {stored: int(value)}
    assert settings(stored) == int(value)
    with pytest.raises(AssertionError, match=stored):
        getattr(settings, name)("wrong")


def test_a_location_is_copied_and_its_storage_can_go_back_to_the_default():
    settings = poptorch.TensorLocationSettings().useOnChipStorage(True)
    options = poptorch.Options()
    options.TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(None)
    assert settings.toDict() == {}
    assert options.TensorLocations.location_weight == {"onChip": 1}


def test_every_setter_is_called_by_keyword_here():
    tested = {accessor for accessor, _, _ in STORED}
    tested |= {f"TensorLocationSettings.{name}" for name in LOCATIONS}
    elsewhere = {
        "anchorTensor",
        "appendToLocationExcludes",
        "disableModuleNamescope",
        "Distributed.setEnvVarNames",
        "from_json",
        "inputReplicaGrouping",
        "loadFromFile",
        "relaxOptimizerAttributesChecks",
        "showCompilationProgressBar",
        "sourceLocationExcludes",
    }
    keys = {line.accessor for line in poptorch.options.table() if not line.summary}
    assert {line.accessor for line in poptorch.options.table()} - keys == (
        tested - {"_Popart.set"}
    ) | elsewhere
