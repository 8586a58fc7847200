"""Check which arguments setters refuse."""

from operator import attrgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch import enums

REFUSED = [
    ("outputMode", ("All",), AssertionError, "poptorch.OutputMode"),
    ("outputMode", (enums.OutputMode.EveryN,), AssertionError, "positive"),
    ("outputMode", (enums.OutputMode.EveryN, 0), AssertionError, "positive"),
    ("randomSeed", (1.5,), AssertionError, "int"),
    ("setExecutionStrategy", ("pipelined",), AssertionError, "PipelinedExecution"),
    ("setAvailableMemoryProportion", ({"CPU0": 0.5},), AssertionError, "IPU0"),
    ("setAvailableMemoryProportion", ({"IPUx": 0.5},), ValueError, "invalid literal"),
    ("setAvailableMemoryProportion", ({"IPU0": 1.5},), ValueError, "from 0 to 1"),
    ("setAvailableMemoryProportion", ({"IPU0": -0.1},), ValueError, "from 0 to 1"),
    ("connectionType", (1,), AssertionError, "ConnectionType"),
    ("syncPattern", (1,), AssertionError, "SyncPattern"),
    ("useIpuId", ("0",), AssertionError, "int"),
    ("useOfflineIpuTarget", (3,), ValueError, "ipu_version"),
    ("deviceIterations", ("2",), AssertionError, "Unexpected type str for option device_it"),
    ("replicationFactor", (2.0,), AssertionError, "Unexpected type"),
    ("logDir", (3,), AssertionError, "Unexpected type"),
    ("broadcastBuffers", ("yes",), AssertionError, "Unexpected type"),
    ("Training.gradientAccumulation", (2.0,), AssertionError, "Unexpected type"),
    (
        "Training.accumulationAndReplicationReductionType",
        (enums.ReductionType.NoReduction,),
        ValueError,
        "ReductionType.Sum",
    ),
    (
        "Training.setMeanAccumulationAndReplicationReductionStrategy",
        (1,),
        ValueError,
        "MeanReductionStrategy",
    ),
    ("Precision.enableFloatingPointExceptions", (1,), AssertionError, "True or False"),
    ("Precision.setPartialsType", (torch.bfloat16,), ValueError, "torch.half"),
    ("Precision.runningStatisticsAlwaysFloat", (1,), ValueError, "True or False"),
    ("Jit.traceModel", (True,), ValueError, "traceModel"),
    ("TensorLocations.setWeightLocation", ({},), AssertionError, "TensorLocationSettings"),
    ("_Popart.setPatterns", ([],), AssertionError, "dict"),
    ("_Popart.setPatterns", ({}, "2"), AssertionError, "int"),
]


@pytest.mark.parametrize(("accessor", "arguments", "error", "text"), REFUSED)
def test_a_wrong_argument_is_refused_and_changes_nothing(accessor, arguments, error, text):
    options = poptorch.Options()
    before = repr(options)
    with pytest.raises(error, match=text):
        attrgetter(accessor)(options)(*arguments)
    assert repr(options) == before


@given(st.integers(-300, 300))
def test_io_tiles_are_an_even_number_in_a_range(tiles):
    locations = poptorch.Options().TensorLocations
    if tiles in range(32, 193, 2):
        assert locations.numIOTiles(tiles)("numIOTiles") == tiles
    else:
        with pytest.raises(
            AssertionError, match=r"numIOTiles must be an even number between 32 and 192\."
        ):
            locations.numIOTiles(tiles)


@given(
    replicas=st.integers(1, 12),
    size=st.integers(1, 12),
    kind=st.sampled_from(enums.CommGroupType),
)
def test_input_groups_divide_the_replicas(replicas, size, kind):
    options = poptorch.Options().replicationFactor(replicas)
    if kind is enums.CommGroupType.NoGrouping:
        size, kind, given_size = 1, enums.CommGroupType.Consecutive, size
        options.inputReplicaGrouping(
            input_group_size=given_size, input_group_type=enums.CommGroupType.NoGrouping
        )
    elif kind is enums.CommGroupType.All or replicas % size:
        with pytest.raises(ValueError, match="input_group_"):
            options.inputReplicaGrouping(size, kind)
        return
    else:
        options.inputReplicaGrouping(size, kind)
    assert (options.input_group_size, options.input_cgt) == (size, kind)


@pytest.mark.parametrize("cls", [poptorch.Options, poptorch.TensorLocationSettings])
def test_a_setter_of_a_class_names_what_is_missing(cls):
    setter = {poptorch.Options: "deviceIterations"}.get(cls, "useOnChipStorage")
    with pytest.raises(TypeError, match=rf"{setter} is called on a class, with 3.*{cls.__name__}"):
        getattr(cls, setter)(3)
