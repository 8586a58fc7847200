"""Check classes that place themselves, and models that are made of plain ones."""

import copy
import pickle

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo import BeginBlock
from ipu_dynamo.optimum import (
    IPUConfig,
    PipelineMixin,
    SerializedEmbedding,
    get_layer_ipu,
    recomputation_checkpoint,
    register,
    to_pipelined,
)
from tests.optimum.small_models import Block, small
from tests.optimum.test_parallelize import begun

CONFIG = IPUConfig(ipus_per_replica=2, seed=3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x


@register()
class PipelinedNet(Net, PipelineMixin):
    def parallelize(self, checkpoints=True):
        super().parallelize()
        for layer, ipu in zip(
            self.layers, get_layer_ipu(self.ipu_config, self.layers), strict=True
        ):
            BeginBlock(layer, ipu_id=ipu)
            if checkpoints:
                recomputation_checkpoint(layer)
        return self


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_registered_class_places_itself():
    plain = Net().eval()
    model = to_pipelined(plain, CONFIG)
    assert type(model) is PipelinedNet
    assert equal(model, plain)
    assert model.table.weight is not plain.table.weight
    assert not model.training
    assert model.ipu_config == CONFIG
    assert model.ipu_config is not CONFIG
    for _ in range(2):  # again, without undoing it before
        assert model.parallelize(**CONFIG.parallelize_kwargs) is model
        assert begun(model) == {"layers.0": 0, "layers.1": 1}
    assert all(len(layer._forward_hooks) == 1 for layer in model.layers)
    assert model.deparallelize() is model
    assert not begun(model)
    assert not any(layer._forward_hooks for layer in model.layers)


def test_hooks_of_a_class_are_removed():
    class Hooked(Net, PipelineMixin):  # as Optimum Graphcore's guide to new models has it
        def parallelize(self):
            super().parallelize()
            for index, layer in enumerate(self.layers):
                self._hooks.append(recomputation_checkpoint(layer))
                self._hooks.append(layer.register_forward_hook(lambda *_: None))
                self.layers[index] = poptorch.BeginBlock(layer, f"Encoder{index}", ipu_id=index)
            return self

    model = Hooked.from_model(Net(), CONFIG)
    before = list(vars(model))
    for _ in range(2):
        model.parallelize()
        assert all(len(layer._forward_hooks) == 2 for layer in model.layers)
        assert begun(model) == {"layers.0": 0, "layers.1": 1}
    twin = copy.deepcopy(model)
    for one in (twin, model):
        one.deparallelize()
        assert not any(layer._forward_hooks for layer in one.layers)
        assert list(vars(one)) == before


def test_a_pipelined_model_is_copied_with_another_configuration():
    model = to_pipelined(Net(), CONFIG)
    other = to_pipelined(model, IPUConfig(seed=4))
    assert (model.ipu_config.seed, other.ipu_config.seed) == (3, 4)
    assert type(other) is PipelinedNet
    assert equal(other, model)


def test_a_configuration_is_kept_where_none_is_given():
    model = to_pipelined(Net(), CONFIG)
    assert PipelinedNet.from_model(model).ipu_config == CONFIG
    assert PipelinedNet.from_model(Net()).ipu_config == IPUConfig()
    assert PipelinedNet.from_model(model, IPUConfig(seed=5)).ipu_config.seed == 5


def test_models_of_transformers(tmp_path):
    plain = small("gpt2", 2).eval()

    class PipelinedGPT2(type(plain), PipelineMixin):
        pass

    plain.generation_config.max_new_tokens = 7
    model = PipelinedGPT2.from_transformers(plain, CONFIG)
    assert equal(model, plain)
    assert model.generation_config.max_new_tokens == 7
    assert not model.training
    plain.save_pretrained(tmp_path)
    read = PipelinedGPT2.from_pretrained_transformers(tmp_path, CONFIG, attn_implementation="eager")
    assert type(read) is PipelinedGPT2
    assert equal(read, plain)
    assert read.ipu_config == CONFIG
    assert read.config._attn_implementation == "eager"


def test_models_of_transformers_stay_frozen_and_in_their_precision():
    plain = small("gpt2", 2).bfloat16()
    plain.transformer.h[0].requires_grad_(False)
    plain.transformer.ln_f.float()

    class PipelinedGPT2(type(plain), PipelineMixin):
        pass

    model = PipelinedGPT2.from_transformers(plain, CONFIG)
    assert equal(model, plain)
    for other, own in zip(plain.parameters(), model.parameters(), strict=True):
        assert (own.dtype, own.requires_grad) == (other.dtype, other.requires_grad)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("force", [False, True])
def test_any_other_class_is_placed_by_rule(force, tmp_path):
    plain = small("bert", 2)
    model = to_pipelined(plain, CONFIG, force=force)
    assert isinstance(model, type(plain))
    assert isinstance(model, PipelineMixin)
    assert type(model) is type(to_pipelined(plain, CONFIG))
    assert model.parallelize() is model
    assert begun(model)["bert.encoder.layer.1"] == 1
    with pytest.raises(RuntimeError, match="parallelized: call deparallelize first"):
        to_pipelined(model, CONFIG)
    model.deparallelize()
    assert not begun(model)
    assert equal(model, plain)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert equal(twin, plain)
        assert twin.ipu_config == CONFIG
    model.save_pretrained(tmp_path)
    assert equal(type(plain).from_pretrained(tmp_path), plain)
    with pytest.raises(RuntimeError, match="is not parallelized"):
        model.deparallelize()


def test_configurations_that_there_are_not():
    model = PipelinedNet()
    with pytest.raises(AttributeError, match="ipu_config"):
        model.ipu_config  # noqa: B018
    with pytest.raises(AttributeError, match="ipu_config"):
        model.parallelize()
    with pytest.raises(TypeError, match=r"an IPUConfig is needed, got \{\}"):
        model.ipu_config = {}


def test_parameters_are_counted():
    model = to_pipelined(Net(), CONFIG)
    every, table = sum(p.numel() for p in model.parameters()), 6 * 4
    assert model.num_parameters() == every
    assert model.num_parameters(exclude_embeddings=True) == every - table
    model.table = SerializedEmbedding(model.table, 2)
    assert model.num_parameters(exclude_embeddings=True) == every - table
    model.layers.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == table


def test_a_base_has_to_be_plain():
    with pytest.raises(ValueError, match="has 0 bases beside the mixin"):
        register()(type("Nothing", (PipelineMixin,), {}))
