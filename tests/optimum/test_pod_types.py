"""Check fields that are dictionaries by type of POD."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.optimum import IncompatibleIPUConfigError, IPUConfig
from ipu_dynamo.optimum.values.pod_types import IPUS

PODS = tuple(IPUS)


@st.composite
def configs(draw):
    """Configurations some of whose fields are dictionaries with every type of POD."""
    kinds = {
        "replication_factor": st.integers(1, 2),
        "inference_replication_factor": st.integers(1, 2),
        "gradient_accumulation_steps": st.integers(1, 5),
        "device_iterations": st.integers(1, 5),
        "inference_device_iterations": st.integers(1, 5),
        "layers_per_ipu": st.sampled_from([[1], [1, 2], [-1]]),
        "matmul_proportion": st.sampled_from([0.1, 0.2, [0.3]]),
        "output_mode": st.sampled_from(["all", "sum", "final", "default"]),
        "seed": st.integers(0, 9),
        "optimizer_state_offchip": st.booleans(),
        "auto_loss_scaling": st.booleans(),
        "replicated_tensor_sharding": st.booleans(),
        "sharded_execution_for_inference": st.booleans(),
        "enable_half_partials": st.booleans(),
        "executable_cache_dir": st.sampled_from(["", "disabled"]),
    }
    values = {}
    for name, kind in kinds.items():
        if draw(st.booleans()):
            by_pod = st.fixed_dictionaries(dict.fromkeys((*PODS, "default"), kind))
            values[name] = draw(kind | by_pod)
    return IPUConfig(**values)


@given(configs(), st.sampled_from([None, *PODS]), st.booleans())
def test_a_type_then_or_now_is_the_same(config, pod, inference):
    special = config.for_pod_type(pod)
    assert special.to_core_options(inference) == config.to_core_options(inference, pod_type=pod)
    assert special.batch_size_factor(inference) == config.batch_size_factor(inference, pod)
    options = config.to_options(inference, pod_type=pod)
    assert repr(special.to_options(inference)) == repr(options)
    assert special.for_pod_type() == special
    assert IPUConfig.from_dict(config.to_dict()) == config


def test_what_follows_from_a_dictionary_waits_for_the_type():
    layers = {"pod4": [1, 2], "pod16": [1, 1, 1]}
    config = IPUConfig(layers_per_ipu=layers)
    assert config.layers_per_ipu == layers
    assert config.ipus_per_replica is None
    assert config.inference_layers_per_ipu is None
    assert config.inference_ipus_per_replica is None
    special = config.for_pod_type("pod16")
    assert (special.layers_per_ipu, special.ipus_per_replica) == ([1, 1, 1], 3)
    assert special.inference_ipus_per_replica == 3
    wrong = IPUConfig(layers_per_ipu=layers, ipus_per_replica=2)
    with pytest.raises(IncompatibleIPUConfigError, match=r"layers_per_ipu=\[1, 1, 1\]"):
        wrong.for_pod_type("pod16")


def test_a_factor_on_one_pod_and_splits_on_another():
    factor, splits = "embedding_serialization_factor", "serialized_embedding_splits_per_ipu"
    values = {factor: {"pod4": None, "pod16": 4}, splits: {"pod4": [1, 1], "pod16": None}}
    config = IPUConfig(ipus_per_replica=2, **values)
    small, large = map(config.for_pod_type, ("pod4", "pod16"))
    assert (getattr(small, factor), getattr(small, splits)) == (None, [1, 1])
    assert (getattr(large, factor), getattr(large, splits)) == (4, None)
    both = IPUConfig(ipus_per_replica=2, **{factor: {"pod4": 2}, splits: [1, 1]})
    with pytest.raises(ValueError, match=f"^Only one of `{factor}=2` and `{splits}="):
        both.for_pod_type("pod4")
    with pytest.raises(ValueError, match=rf"{splits}=\[1\] should use the same number of IPUs"):
        IPUConfig(ipus_per_replica=2, **{factor: {"pod4": 2}, splits: [1]})


def test_a_specialised_configuration_has_values_of_its_own():
    config = IPUConfig(layers_per_ipu=[1, 1], parallelize_kwargs={"a": [1]})
    special = config.for_pod_type("pod4")
    special.layers_per_ipu.append(2)
    special.parallelize_kwargs["a"].append(2)
    assert (config.layers_per_ipu, config.parallelize_kwargs) == ([1, 1], {"a": [1]})


def test_types_that_are_not_there():
    config = IPUConfig(replication_factor={"pod4": 1, "pod128": 8})
    for use in (config.to_options, config.to_core_options, config.batch_size_factor):
        with pytest.raises(RuntimeError, match='`replication_factor` has no entry "default"'):
            use()
        with pytest.raises(KeyError, match="`replication_factor` has no entry for pod8"):
            use(pod_type="pod8")
        for unknown in ("pod3", "pod128", "default"):
            with pytest.raises(ValueError, match="choose one of pod4, pod8, pod16, pod32, pod64"):
                use(pod_type=unknown)


@pytest.mark.parametrize("twin", ["", "inference_"])
def test_replicas_fit_on_the_pod(twin):
    values = {f"{twin}replication_factor": 8, f"{twin}ipus_per_replica": 4}
    config = IPUConfig(inference_ipus_per_replica=4) if twin else IPUConfig()
    config = IPUConfig(**({"ipus_per_replica": 1} if twin else {}), **values)
    words = (
        f"^{twin}replication_factor=8 times {twin}ipus_per_replica=4 needs 32 IPUs, "
        "but pod16 has 16$"
    )
    with pytest.raises(RuntimeError, match=words):
        config.for_pod_type("pod16")
    assert config.for_pod_type("pod32") == config


def test_the_mode_stays():
    assert IPUConfig(seed={"default": 1}).eval().for_pod_type().mode == "inference"
