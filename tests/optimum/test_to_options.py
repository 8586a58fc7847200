"""Check which options a configuration gives, in PopTorch's words and in the core's."""

import pytest
import torch
from hypothesis import given

import popart
import poptorch
from ipu_dynamo import predict
from ipu_dynamo.optimum import IncompatibleIPUConfigError, IPUConfig, to_options
from poptorch.options.adopt import adopt
from poptorch.translate import core_options
from tests.optimum.test_pod_types import configs

HINTS = {
    "disableGradAccumulationTensorStreams": True,
    "accumulateOuterFragmentSettings.schedule": int(
        popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
    ),
    "accumulateOuterFragmentSettings.excludedVirtualGraphs": ["0"],
    "outlineThreshold": 10.0,
    "subgraphCopyingStrategy": int(popart.SubgraphCopyingStrategy.JustInTime),
    "scheduleNonWeightUpdateGradientConsumersEarly": True,
}


def config(**more):
    return IPUConfig(
        ipus_per_replica=2,
        replication_factor=2,
        inference_replication_factor=3,
        gradient_accumulation_steps=4,
        device_iterations=5,
        inference_device_iterations=6,
        matmul_proportion=[0.1, 0.2],
        inference_matmul_proportion=0.3,
        replicated_tensor_sharding=True,
        auto_loss_scaling=True,
        output_mode="sum",
        **more,
    )


def test_training():
    options = config(seed=0).to_options()
    values = options.toDict()
    expected = {
        "auto_round_num_ipus": True,
        "replication_factor": 2,
        "device_iterations": 5,
        "gradient_accumulation": 4,
        "accumulation_and_replication_reduction_type": poptorch.ReductionType.Mean,
        "automaticLossScalingSettings.enabled": True,
        "output_mode": poptorch.OutputMode.Sum.value,
        "random_seed": 0,
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "available_memory_proportion": {0: 0.1, 1: 0.2},
        "enableStochasticRounding": True,
        "partialsTypeMatMuls": "half",
        **HINTS,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert poptorch.OutputMode(values["output_mode"]).name.lower() == "sum"
    strategy = options._execution_strategy
    assert type(strategy) is poptorch.PipelinedExecution
    assert strategy.auto_stage is poptorch.AutoStage.AutoIncrement
    assert not {"cachePath", "ipu_version", "enableExplicitIR"} & values.keys()


def test_inference():
    options = config(explicit_ir_inference=True, executable_cache_dir="there").to_options(True)
    values = options.toDict()
    expected = {
        "replication_factor": 3,
        "device_iterations": 6,
        "gradient_accumulation": 1,
        "output_mode": poptorch.OutputMode.All.value,
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "available_memory_proportion": {0: 0.3, 1: 0.3},
        "enableStochasticRounding": False,
        "enableExplicitIR": True,
        "cachePath": "there",
        **HINTS,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert "automaticLossScalingSettings.enabled" not in values
    assert "random_seed" not in values
    assert type(options._execution_strategy) is poptorch.PipelinedExecution
    sharded = config(sharded_execution_for_inference=True).to_options(for_inference=True)
    assert type(sharded._execution_strategy) is poptorch.ShardedExecution
    trained = config(sharded_execution_for_inference=True).to_options()
    assert type(trained._execution_strategy) is poptorch.PipelinedExecution


def test_what_is_off_is_not_set():
    off = IPUConfig(
        optimizer_state_offchip=False,
        replicated_tensor_sharding=True,
        enable_half_partials=False,
        executable_cache_dir="disabled",
    )
    values = off.to_options().toDict()
    assert values["location_optimizer"] == {"onChip": 1, "useReplicatedTensorSharding": 0}
    assert not {"partialsTypeMatMuls", "cachePath"} & values.keys()


@pytest.mark.parametrize("word", ["all", "sum", "final", "default"])
def test_output_modes(word):
    options = IPUConfig(output_mode=word).to_options()
    assert poptorch.OutputMode(options.output_mode).name.lower() == word
    assert IPUConfig(output_mode=word).to_options(True).output_mode == poptorch.OutputMode.All.value


@pytest.mark.parametrize("version", ["ipu1", "ipu:"])
def test_other_generations_are_refused_unless_it_only_compiles(version, monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", version)
    with pytest.raises(RuntimeError, match="Optimum Graphcore runs on 2 and 21"):
        IPUConfig().to_options()
    assert IPUConfig().to_options(compile_only=True).exists("ipu_version")
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu21")
    monkeypatch.setenv("IPU_DYNAMO_HARDWARE", "0")
    assert not IPUConfig().to_options().exists("ipu_version")


def test_proportions_that_are_assigned_later_are_one_for_each_ipu():
    one = IPUConfig(ipus_per_replica=2)
    one.update_from_string("matmul_proportion=[0.08 0.2 0.25 0.25]")
    assert one.to_options().toDict()["available_memory_proportion"] == {0: 0.08, 1: 0.2}
    one.inference_ipus_per_replica = 4
    one.inference_matmul_proportion = [0.1, 0.2]
    words = r"inference_matmul_proportion=\[0.1, 0.2\] has 2 .*inference_ipus_per_replica=4 IPUs"
    with pytest.raises(IncompatibleIPUConfigError, match=words):
        one.to_options(for_inference=True)


def test_the_mode_stays_and_options_are_new():
    one = IPUConfig().eval()
    assert one.to_options() is not one.to_options()
    assert one.mode == "inference"


@pytest.mark.parametrize("inference", [False, True])
@given(configs())
def test_the_core_is_told_what_poptorch_makes_of_it(inference, one):
    options = adopt(one.to_options(for_inference=inference), training=not inference)
    theirs = core_options(options, training=not inference)
    assert one.to_core_options(for_inference=inference) == theirs
    pipelined = theirs.strategy.kind == "pipelined"
    assert theirs.strategy.sharded_if_short == (inference and pipelined)


def test_only_a_configuration_permits_inference_to_run_sharded():
    model = torch.nn.Sequential(
        poptorch.BeginBlock(torch.nn.Linear(2, 2), ipu_id=0),
        poptorch.BeginBlock(torch.nn.Linear(2, 2), ipu_id=1),
    )
    options = IPUConfig().to_options(for_inference=True)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater than or equal"):
        poptorch.inferenceModel(model, options)(torch.ones(1, 2))


def test_numbers_of_popart_are_its_own():
    assert HINTS["accumulateOuterFragmentSettings.schedule"] == to_options.OVERLAP_MEMORY_OPTIMIZED
    assert HINTS["subgraphCopyingStrategy"] == to_options.JUST_IN_TIME


@pytest.mark.parametrize("door", ["poptorch", "core"])
def test_shares_of_memory_move_cycles(door, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    x = torch.randn(256, 2048)
    cycles = {}
    for share in (0.6, 0.01):
        one = IPUConfig(inference_matmul_proportion=share, inference_ipus_per_replica=1)
        layer = torch.nn.Linear(2048, 4096)
        if door == "poptorch":
            executor = poptorch.inferenceModel(
                layer, one.to_options(for_inference=True).logCycleCount(True)
            )
            executor(x)
            cycles[share] = executor.cycleCount()
        else:
            options = one.to_core_options(for_inference=True)
            cycles[share] = predict(layer, x, options=options).cycles
    assert cycles[0.6] < cycles[0.01]
