"""Check what a text may set, and that a text which fails sets nothing."""

import copy

import pytest

from ipu_dynamo.optimum import IPUConfig


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=3", {"seed": 3}),
        ("seed = 3 , output_mode = sum", {"seed": 3, "output_mode": "sum"}),
        ("seed=3, matmul_proportion=[0.08 0.2]", {"seed": 3, "matmul_proportion": [0.08, 0.2]}),
        ("matmul_proportion=1", {"matmul_proportion": 1.0}),
        ("layers_per_ipu=[1 2]", {"layers_per_ipu": [1, 2], "ipus_per_replica": 1}),
        ("layers_per_ipu=[]", {"layers_per_ipu": []}),
        ("layers_per_ipu=auto", {"layers_per_ipu": "auto"}),
        ("inference_layers_per_ipu=auto", {"inference_layers_per_ipu": "auto"}),
        ("auto_loss_scaling=Y,optimizer_state_offchip=0", {"auto_loss_scaling": True}),
        ("optimizer_state_offchip=No", {"optimizer_state_offchip": False}),
        ("executable_cache_dir=1", {"executable_cache_dir": "1"}),
        ("serialized_embedding_splits_per_ipu=[0 2]", {"embedding_serialization_factor": 1}),
    ],
)
def test_texts_become_the_declared_types(text, values):
    config = IPUConfig()
    config.update_from_string(text)
    for name, value in values.items():
        now = getattr(config, name)
        assert (now, type(now)) == (value, type(value))


def test_the_last_of_two_counts(caplog):
    config = IPUConfig()
    config.update_from_string("gradient_accumulation_steps=4,seed=1,gradient_accumulation_steps=8")
    assert (config.gradient_accumulation_steps, config.seed) == (8, 1)
    assert "sets gradient_accumulation_steps twice, and the last one counts: 8" in caplog.text


def test_a_dictionary_by_pod_type_is_replaced():
    config = IPUConfig(replication_factor={"pod4": 1, "pod16": 4})
    config.update_from_string("replication_factor=2")
    assert config.replication_factor == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_embd=10", "'n_embd'"),
        ("replication_factor=[1 2]", r"replication_factor cannot be '\[1 2\]': its type is int"),
        ("serialized_embedding_splits_per_ipu=2", "cannot be '2'"),
        ("parallelize_kwargs={}", "parallelize_kwargs cannot be"),
        ("parallelize_kwargs=[a]", "parallelize_kwargs cannot be"),
        ("optimizer_state_offchip=maybe", "optimizer_state_offchip cannot be 'maybe'"),
        ("seed=1.5", "seed cannot be '1.5'"),
        ("layers_per_ipu=[1 x]", "layers_per_ipu cannot be"),
        ("layers_per_ipu=other", "layers_per_ipu cannot be 'other'"),
        ("replication_factor=0", "`replication_factor` must be >= 1, got 0"),
        ("output_mode=last", "`output_mode` must be one of"),
        ("seed=1,2", "'2' in"),
        ("seed=x,seed=2", "seed cannot be 'x'"),
        ("matmul_proportion=[0.1 inf]", "`matmul_proportion` must have finite numbers"),
        ("seed=1=2", "'seed=1=2'"),
        ("seed", "'seed'"),
        ("seed=1,", "'' in"),
        ("", "'' in ''"),
    ],
)
def test_a_text_that_fails_changes_nothing(text, words):
    config = IPUConfig()
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match=words):
        config.update_from_string(f"auto_loss_scaling=true,{text}" if text else text)
    assert config == before
