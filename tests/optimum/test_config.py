"""Check a configuration by itself: defaults, checks at every assignment, modes, batch factors."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
import typeguard
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from ipu_dynamo.optimum import IncompatibleIPUConfigError, IPUConfig
from ipu_dynamo.optimum.values.fields import fields_of

FIELDS = fields_of(IPUConfig)
TWINS = [name for name in FIELDS if f"inference_{name}" in FIELDS]


def test_importing_it_imports_none_of_the_libraries_it_serves():
    code = (
        "import sys, ipu_dynamo.optimum as o; o.IPUConfig().to_core_options();"
        "print([m for m in ('poptorch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_typeguard_the_import_names_the_extra():
    code = "import sys; sys.modules['typeguard'] = None; import ipu_dynamo.optimum"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: ipu_dynamo.optimum needs typeguard" in done.stderr
    assert "pip install '.[optimum]'" in done.stderr


@pytest.mark.parametrize(
    ("given_values", "ipus"),
    [
        ({}, (1, 1)),
        ({"ipus_per_replica": 10}, (10, 10)),
        ({"ipus_per_replica": 10, "inference_layers_per_ipu": [1, 2, 3]}, (10, 3)),
        ({"layers_per_ipu": [1, 2]}, (2, 2)),
        ({"layers_per_ipu": [1, 2], "inference_layers_per_ipu": [3]}, (2, 1)),
        ({"layers_per_ipu": "auto", "ipus_per_replica": 4}, (4, 4)),
        ({"layers_per_ipu": [1, -1], "ipus_per_replica": 3}, (3, 2)),
        ({"inference_layers_per_ipu": "auto", "ipus_per_replica": 3}, (3, 3)),
    ],
)
def test_numbers_of_ipus_follow_from_layers(given_values, ipus):
    config = IPUConfig(**given_values)
    assert (config.ipus_per_replica, config.inference_ipus_per_replica) == ipus


def test_inference_layers_and_proportions_follow_training():
    layers, shares = [1, 2], [0.1, 0.2]
    config = IPUConfig(layers_per_ipu=layers, matmul_proportion=shares)
    assert config.inference_layers_per_ipu == layers
    assert config.inference_matmul_proportion == shares
    config.inference_layers_per_ipu.append(3)  # another list
    assert config.layers_per_ipu == layers == [1, 2]
    other = IPUConfig(layers_per_ipu=layers, matmul_proportion=shares, inference_layers_per_ipu=[3])
    assert other.inference_matmul_proportion == 0.6
    assert IPUConfig(ipus_per_replica=4, matmul_proportion=[0.25]).matmul_proportion == [0.25]


def test_a_factor_is_one_unless_splits_stand_for_it():
    config = IPUConfig(serialized_embedding_splits_per_ipu=[2])
    assert config.embedding_serialization_factor is None
    assert config.inference_embedding_serialization_factor == 1
    assert config.projection_serialization_factor == 1


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("seed", "3", "str"),
        ("seed", 1.5, "float"),
        ("replication_factor", None, "NoneType"),
        ("layers_per_ipu", "all", "str"),
        ("layers_per_ipu", [1, "2"], "list"),
        ("inference_layers_per_ipu", (1, 2), "tuple"),
        ("matmul_proportion", [0.1, None], "list"),
        ("parallelize_kwargs", {1: 2}, "dict"),
        ("parallelize_kwargs", [], "list"),
        ("replication_factor", {}, "dict"),
        ("replication_factor", {"pod3": 1}, "dict"),
        ("replication_factor", {"pod4": "1"}, "str"),
        ("replication_factor", {"pod4": {"pod4": 1}}, "dict"),
    ],
)
def test_wrong_types_name_attribute_type_and_value_then_and_later(name, value, kind):
    later = IPUConfig()
    before = copy.deepcopy(later)
    for assign in (lambda: IPUConfig(**{name: value}), lambda: setattr(later, name, value)):
        with pytest.raises(TypeError) as error:
            assign()
        text = str(error.value)
        assert f"`{name}` must be of type" in text
        assert text.endswith(f", a {kind}")
    assert later == before


def test_numbers_pass_where_python_takes_them():
    config = IPUConfig(matmul_proportion=1, replication_factor=True, seed=True)
    options = config.to_options()
    assert options.toDict()["available_memory_proportion"] == {0: 1.0}


def test_typeguards_own_settings_stay():
    before = repr(typeguard.config)
    IPUConfig()
    assert repr(typeguard.config) == before


BOUNDS = {name: field.lowest for name, field in FIELDS.items() if field.lowest is not None}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_below_a_bound_are_refused_then_and_later(name):
    lowest, several = BOUNDS[name], "list" in str(FIELDS[name].declared)
    low = lowest - 1
    value, words = ([1, low], "have all elements") if several else (low, "be")
    config = IPUConfig()
    for given_value in (value, {"pod4": value, "default": 1 if not several else [1]}):
        with pytest.raises(ValueError, match=f"`{name}` must {words} >= {lowest}, got") as error:
            setattr(config, name, given_value)
        assert str(error.value).endswith(repr(value))
        with pytest.raises(ValueError, match=f"`{name}` must {words} >= {lowest}"):
            IPUConfig(**{name: given_value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.splits])
def test_splits_are_some_and_consecutive(name):
    config = IPUConfig()
    with pytest.raises(ValueError, match=rf"`{name}=\[0, 0\]` must have atleast 1 split"):
        setattr(config, name, [0, 0])
    with pytest.raises(ValueError, match=rf"`{name}=\[1, 0, 2\]` must have its splits on cons"):
        setattr(config, name, [1, 0, 2])
    setattr(config, name, [0, 1, 2, 0])


@pytest.mark.parametrize("twin", ["", "inference_"])
@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("matmul_proportion", [0.1, 0.2], IncompatibleIPUConfigError),
        ("layers_per_ipu", [1, 2], IncompatibleIPUConfigError),
        ("serialized_embedding_splits_per_ipu", [1, 2], ValueError),
        ("serialized_projection_splits_per_ipu", [1, 2], ValueError),
    ],
)
def test_lists_have_an_entry_for_each_ipu(twin, name, value, kind):
    ipus = {f"{twin}ipus_per_replica": 3}
    if not twin:
        ipus["inference_ipus_per_replica"] = 3
    with pytest.raises(kind) as error:
        IPUConfig(**ipus, **{f"{twin}{name}": value})
    assert str(error.value) == (
        f"{twin}{name}={value} should use the same number of IPUs as {twin}ipus_per_replica=3"
    )
    later = IPUConfig(**ipus)
    setattr(later, f"{twin}{name}", value)  # lengths are not checked again
    if name == "layers_per_ipu":
        IPUConfig(**ipus, **{f"{twin}{name}": [1, -1]})  # waits for the model


@pytest.mark.parametrize("twin", ["", "inference_"])
@pytest.mark.parametrize("kind", ["embedding", "projection"])
def test_a_layer_has_a_factor_or_splits(twin, kind):
    factor = f"{twin}{kind}_serialization_factor"
    splits = f"{twin}serialized_{kind}_splits_per_ipu"
    with pytest.raises(ValueError, match=f"^Only one of `{factor}=2` and `{splits}="):
        IPUConfig(**{factor: 2, splits: [2]})


def test_sharing_among_one_is_said(caplog):
    assert IPUConfig(replicated_tensor_sharding=True).replicated_tensor_sharding is True
    assert "nobody to share with" in caplog.text


def test_unknown_keywords_are_named_with_their_nearest():
    with pytest.raises(IncompatibleIPUConfigError) as error:
        IPUConfig(layer_per_ipu=[1], learning_rate=0.1)
    text = str(error.value)
    assert "`layer_per_ipu` (given [1]); did you mean layers_per_ipu" in text
    assert "`learning_rate` (given 0.1)" in text


def test_what_is_gone_or_of_the_base_class_is_taken(caplog):
    with caplog.at_level(logging.WARNING):
        config = IPUConfig(use_popdist=True, profile_dir="", torch_dtype=None, model_type="")
    assert [r.getMessage() for r in caplog.records] == [
        "`use_popdist=True` of an IPUConfig is ignored: it is gone"
    ]
    assert config == IPUConfig()


def test_every_key_of_the_base_class_is_taken():
    transformers = pytest.importorskip("transformers")
    assert IPUConfig(**transformers.PretrainedConfig().to_dict()) == IPUConfig()


def test_unknown_output_modes_are_refused():
    with pytest.raises(ValueError, match="all, sum, final, default, got 'last'"):
        IPUConfig().output_mode = "last"


def test_modes_say_what_underscore_names_mean():
    config = IPUConfig(layers_per_ipu=[1, 2], inference_layers_per_ipu=[3])
    assert (config.mode, config._layers_per_ipu) == ("training", [1, 2])
    assert config.eval() is config
    assert config._layers_per_ipu == [3]
    assert config._get_managed_attr_mode_name("layers_per_ipu") == "inference_layers_per_ipu"
    assert config._get_managed_attr_mode_name("seed") == "seed"
    config._layers_per_ipu = [4]
    assert (config.inference_layers_per_ipu, config.layers_per_ipu) == ([4], [1, 2])
    assert config.train()._layers_per_ipu == [1, 2]
    with pytest.raises(ValueError, match="`IPUConfig` mode can only take the values training"):
        config.mode = "test"
    assert IPUConfig.modes == ("training", "inference")
    assert config.eval() == config.train()
    for name in TWINS:
        if hasattr(IPUConfig, f"_{name}"):
            config.eval()
            assert getattr(config, f"_{name}") == getattr(config, f"inference_{name}")


counts = st.integers(1, 3)


@given(counts, counts, counts, counts, counts)
def test_the_batch_factor_is_what_the_data_loader_takes(r, a, d, ri, di):
    config = IPUConfig(
        replication_factor=r,
        gradient_accumulation_steps=a,
        device_iterations=d,
        inference_replication_factor=ri,
        inference_device_iterations=di,
    )
    micro_batch, items = 2, torch.zeros(400, 1)
    for inference in (False, True):
        loader = poptorch.DataLoader(
            config.to_options(for_inference=inference),
            torch.utils.data.TensorDataset(items),
            batch_size=micro_batch,
        )
        (first,) = next(iter(loader))
        assert len(first) == micro_batch * config.batch_size_factor(for_inference=inference)
