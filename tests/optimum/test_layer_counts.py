"""Check how layers are shared out to IPUs, and how encoder and decoder share them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ipu_dynamo.optimum import (
    IncompatibleIPUConfigError,
    IPUConfig,
    get_layer_ipu,
    split_encoder_decoder_ipu_config,
)
from ipu_dynamo.optimum.layer_counts import layer_counts


@pytest.mark.parametrize(
    ("counts", "ipus", "layers", "expanded"),
    [
        ([-1], 2, 7, [3, 4]),
        ([-1, -1], 2, 7, [3, 4]),
        ([-1, 2, -1, 2], 4, 7, [1, 2, 2, 2]),
        ([-1], 4, 11, [2, 2, 2, 5]),
        ([1, 2], 2, 3, [1, 2]),
        ([0, 3], 2, 3, [0, 3]),
        ([5, -1], 1, 9, [9]),
        ([-1], 4, 2, [0, 0, 0, 2]),
    ],
)
def test_wildcards(counts, ipus, layers, expanded):
    config = IPUConfig(layers_per_ipu=counts, ipus_per_replica=ipus)
    assert layer_counts(config, layers) == expanded
    placed = get_layer_ipu(config, list(range(layers)))
    assert placed == get_layer_ipu(config, layers)
    assert [placed.count(ipu) for ipu in range(ipus)] == expanded


@given(st.lists(st.integers(-1, 4), min_size=2, max_size=6), st.integers(0, 30))
def test_expansion_sums_up_and_keeps_what_is_fixed(counts, layers):
    fixed, free = sum(n for n in counts if n > 0), counts.count(-1)
    assume(fixed <= layers if free else fixed == layers)
    config = IPUConfig(layers_per_ipu=counts)
    expanded = layer_counts(config, layers)
    assert sum(expanded) == layers
    assert all(new == old for new, old in zip(expanded, counts, strict=True) if old != -1)
    shared = [new for new, old in zip(expanded, counts, strict=True) if old == -1]
    assert len(set(shared[:-1])) <= 1
    assert not shared or shared[-1] - shared[0] == (layers - fixed) % free * (len(shared) > 1)


def test_the_mode_chooses_the_fields_and_their_names():
    config = IPUConfig(layers_per_ipu=[1, 2], inference_layers_per_ipu=[3])
    assert get_layer_ipu(config, 3) == [0, 1, 1]
    assert get_layer_ipu(config.eval(), 3) == [0, 0, 0]
    config.inference_layers_per_ipu, config.inference_ipus_per_replica = [1, 1], 2
    with pytest.raises(IncompatibleIPUConfigError, match="inference_layers_per_ipu does not def"):
        get_layer_ipu(config, 3)
    assert get_layer_ipu(IPUConfig(layers_per_ipu={"default": [1, 2]}), 3) == [0, 1, 1]
    assert get_layer_ipu(config.train()) == [0, 1, 1]


@pytest.mark.parametrize(
    ("values", "layers", "words"),
    [
        ({"layers_per_ipu": [1, 2]}, 4, r"does not define .*\[1, 2\] has 3, the model 4"),
        ({"layers_per_ipu": [-1, 5]}, 4, "has 5 layers in its fixed entries, the model 4"),
        ({"layers_per_ipu": "auto", "ipus_per_replica": 2}, 4, "plan_layers"),
        (
            {"layers_per_ipu": [1, -1], "ipus_per_replica": 3},
            4,
            r"does not match ipus_per_replica: layers_per_ipu=\[1, -1\], ipus_per_replica=3",
        ),
    ],
)
def test_layers_that_do_not_fit(values, layers, words):
    with pytest.raises(IncompatibleIPUConfigError, match=words):
        get_layer_ipu(IPUConfig(**values), layers)


@pytest.mark.parametrize("ipus", [1, 2])
def test_no_model_has_fewer_than_no_layers(ipus):
    config = IPUConfig(ipus_per_replica=ipus)
    assert get_layer_ipu(config, 0) == []
    with pytest.raises(ValueError, match="cannot have -3 layers"):
        get_layer_ipu(config, -3)


def test_encoder_and_decoder_take_their_ipus():
    config = IPUConfig(
        layers_per_ipu=[1, 2, 3, 0, 5, 6, 7, 8],
        matmul_proportion=[0.1] * 4 + [0.2] * 4,
        serialized_embedding_splits_per_ipu=[1, 1] + [0] * 6,
        serialized_projection_splits_per_ipu=[0] * 6 + [2, 1],
        seed=3,
    )
    encoder, decoder = split_encoder_decoder_ipu_config(config, 6, 26)
    assert (encoder.layers_per_ipu, decoder.layers_per_ipu) == ([1, 2, 3, 0], [5, 6, 7, 8])
    assert (encoder.ipus_per_replica, decoder.ipus_per_replica) == (4, 4)
    assert (encoder.matmul_proportion, decoder.matmul_proportion) == ([0.1] * 4, [0.2] * 4)
    assert encoder.serialized_embedding_splits_per_ipu == [1, 1, 0, 0]
    assert decoder.serialized_projection_splits_per_ipu == [0, 0, 2, 1]
    assert encoder.serialized_projection_splits_per_ipu is None
    assert decoder.serialized_embedding_splits_per_ipu is None
    assert encoder.seed == decoder.seed == 3
    assert config.ipus_per_replica == 8
    for part in (encoder, decoder):
        assert IPUConfig.from_dict(part.to_dict()) == part
    config.serialized_embedding_splits_per_ipu = [0] * 3 + [1, 1] + [0] * 3
    with pytest.raises(ValueError, match=r"serialized_embedding.* must have all splits placed on"):
        split_encoder_decoder_ipu_config(config, 6, 26)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 4, 8]))
def test_encoder_and_decoder_together_are_the_whole(encoder, decoder, ipus):
    config = IPUConfig(ipus_per_replica=ipus)
    try:
        parts = split_encoder_decoder_ipu_config(config, encoder, decoder)
    except IncompatibleIPUConfigError as error:
        assert "Unable to find a valid split of ipu_config.layers_per_ipu" in str(error)  # noqa: PT017
        return
    counts = layer_counts(config, encoder + decoder)
    assert parts[0].layers_per_ipu + parts[1].layers_per_ipu == counts
    assert parts[0].ipus_per_replica + parts[1].ipus_per_replica == ipus
    assert sum(parts[0].layers_per_ipu) == encoder
    assert parts[0].matmul_proportion == parts[1].matmul_proportion == 0.6


def test_one_ipu_cannot_be_split():
    for config, twin in ((IPUConfig(), ""), (IPUConfig().eval(), "inference_")):
        words = f"^Need {twin}ipus_per_replica to be at least 2 .*, got 1$"
        with pytest.raises(IncompatibleIPUConfigError, match=words):
            split_encoder_decoder_ipu_config(config, 2, 2)


@pytest.mark.parametrize("twin", ["", "inference_"])
def test_a_split_that_cannot_be_says_by_which_field(twin):
    config = IPUConfig(layers_per_ipu=[1, 3])
    config.mode = "inference" if twin else "training"
    words = rf"valid split of ipu_config.{twin}layers_per_ipu: .*\[1, 3\] have the 2 layers"
    with pytest.raises(IncompatibleIPUConfigError, match=words):
        split_encoder_decoder_ipu_config(config, 2, 2)


def test_truth_values_are_numbers_of_layers():
    assert get_layer_ipu(IPUConfig(layers_per_ipu=[True, 2]), 3) == [0, 1, 1]
    assert get_layer_ipu(IPUConfig(ipus_per_replica=True), 2) == [0, 0]


def test_the_original_configuration_is_read_and_a_list_is_none():
    original = type("IPUConfig", (), {"to_dict": lambda self: {"layers_per_ipu": [1, 2]}})()
    assert get_layer_ipu(original, 3) == [0, 1, 1]
    encoder, decoder = split_encoder_decoder_ipu_config(original, 1, 2)
    assert (encoder.layers_per_ipu, decoder.layers_per_ipu) == ([1], [2])
    with pytest.raises(TypeError, match=r"an IPUConfig is needed, got \[1, 2\], a list"):
        get_layer_ipu([1, 2])
