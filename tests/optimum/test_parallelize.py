"""Check where `parallelize` begins blocks, what it refuses, and that all of it is undone."""

import copy
import logging

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo import Options, blocks, compile_inference, compile_training
from ipu_dynamo.optimum import (
    IncompatibleIPUConfigError,
    IPUConfig,
    SerializedEmbedding,
    SerializedLinear,
    SplitProjection,
    deparallelize,
    parallelize,
)
from ipu_dynamo.optimum.placement.find_layers import find_layer_lists
from tests.optimum.small_models import SMALL, Block, TwoLists, small


def begun(model):
    """The IPU of each block by the path of the module that begins it."""
    return {
        name: hook.ipu_id
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, blocks.BlockStart)
    }


def snapshot(model):
    """All that a module is, but for the values of its weights."""
    return {
        path: (
            type(module),
            {
                name: dict(value) if isinstance(value, dict) else value
                for name, value in vars(module).items()
            },
        )
        for path, module in model.named_modules(remove_duplicate=False)
    }


def config_of(ipus=2, **fields):
    return IPUConfig(ipus_per_replica=ipus, **fields)


FIELDS = [
    {},
    {"embedding_serialization_factor": 4},
    {"projection_serialization_factor": 2, "recompute_checkpoint_every_layer": True},
    {"serialized_projection_splits_per_ipu": [0, 3]},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("bert", "llama", "t5") else pytest.mark.slow)
        for name in SMALL
    ],
)
def test_all_of_it_is_undone(name, fields, tmp_path):
    model = small(name, 2)
    seen = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: seen.append(module))
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    inputs = SMALL[name].batch(2)
    expected = model(**inputs)[0]
    parallelize(model, config_of(**fields), layers=SMALL[name].layers)
    assert vars(model).keys() == before[""][1].keys()
    torch.testing.assert_close(model(**inputs)[0], expected)
    assert deparallelize(model) is model
    after = snapshot(model)
    assert after.keys() == before.keys()
    for path, (kind, attributes) in before.items():
        assert after[path][0] is kind, path
        assert list(after[path][1]) == list(attributes), path
        for attribute, value in attributes.items():
            got = after[path][1][attribute]
            if isinstance(value, dict):
                assert list(got) == list(value), (path, attribute)
                assert all(got[key] is value[key] for key in value), (path, attribute)
            else:
                assert got is value or got == value, (path, attribute)
    state = model.state_dict()
    assert list(state) == list(weights)
    assert all(torch.equal(state[key], value) for key, value in weights.items())
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(again[key], value) for key, value in state.items())


@pytest.mark.parametrize("fields", FIELDS[1:], ids=str)
def test_weights_of_now_are_put_back(fields):
    model = small("llama", 2)
    parallelize(model, config_of(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.eval().double()
    deparallelize(model)
    plain = small("llama", 2).double()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name] + 1, rtol=0, atol=1e-6)
    assert not any(module.training for module in model.modules())


def test_blocks_of_a_model_with_a_tied_head():
    model = parallelize(small("bert", 4), config_of(4, layers_per_ipu=[1, 0, 2, 1]))
    embeddings = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    assert begun(model) == {
        **{f"bert.embeddings.{name}": 0 for name in embeddings},
        **{f"bert.encoder.layer.{layer}": ipu for layer, ipu in enumerate((0, 2, 2, 3))},
        "cls.predictions.decoder": 0,
    }


def test_blocks_of_encoder_and_decoder():
    model = parallelize(small("bart", 4), config_of(4))
    assert {name: ipu for name, ipu in begun(model).items() if "layers" in name} == {
        "model.encoder.layers.0": 0,
        "model.encoder.layers.1": 1,
        "model.decoder.layers.0": 2,
        "model.decoder.layers.1": 3,
    }
    assert begun(model)["model.decoder.embed_tokens"] == 0
    config = config_of(4, gradient_accumulation_steps=10)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    step = poptorch.trainingModel(model, config.to_options(), optimizer)
    with pytest.raises(poptorch.Error, match="a model with 6 pipeline stages"):
        step(**SMALL["bart"].batch(10))


def test_the_table_is_logged_once_with_sums(caplog):
    with caplog.at_level(logging.INFO, "ipu_dynamo.optimum"):
        model = parallelize(small("bert", 2), config_of())
    (text,) = [r.getMessage() for r in caplog.records if "parameters" in r.getMessage()]
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["BertForMaskedLM"]
    assert ["bert.embeddings.word_embeddings", "0", "240", "960"] in rows
    total = sum(p.numel() for p in model.parameters())
    assert sum(int(row[2]) for row in rows if row[0] == "all") == total
    assert ["cls.predictions.decoder", "0", "30", "120"] in rows  # its bias; the table has the rest
    assert ["cls.predictions.transform.dense", "~1", "72", "288"] in rows


def test_parts_by_the_mode():
    config = config_of(
        projection_serialization_factor=2, inference_embedding_serialization_factor=3
    )
    model = parallelize(small("llama", 2), config)
    assert type(model.lm_head) is SerializedLinear
    assert model.lm_head.factor == 2
    deparallelize(model)
    parallelize(model, config.eval())
    assert type(model.get_input_embeddings()) is SerializedEmbedding
    assert type(model.lm_head) is nn.Linear


def test_parts_of_a_tied_table(caplog):
    model = small("bert", 2)
    config = config_of(embedding_serialization_factor=4, projection_serialization_factor=2)
    parallelize(model, config)
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert model.cls.predictions.decoder.factor == 2
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    assert "the embedding's factor 4 has nothing to act on" in caplog.text
    deparallelize(model)
    parallelize(model, config_of(serialized_projection_splits_per_ipu=[0, 3]))
    assert model.cls.predictions.decoder.factor == 3
    assert begun(model)["cls.predictions.decoder"] == 1
    assert begun(model)["bert.embeddings.word_embeddings"] == 1
    deparallelize(model)
    for splits, words in (
        ({"serialized_embedding_splits_per_ipu": [1, 1]}, "reads the whole table"),
        ({"serialized_projection_splits_per_ipu": [1, 1]}, "leave one entry that is not 0"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            parallelize(model, config_of(**splits))
        assert str(error.value).startswith(f"{next(iter(splits))}=[1, 1]")
    assert not begun(model)


def test_one_table_with_three_owners_gives_way_to_one_layer():
    model = small("t5", 2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    inputs = SMALL["t5"].batch(2)
    expected = model(**inputs).loss
    parallelize(model, config_of(embedding_serialization_factor=4))
    assert type(model.shared) is SerializedEmbedding
    assert model.shared is model.encoder.embed_tokens is model.decoder.embed_tokens
    torch.testing.assert_close(model(**inputs).loss, expected)
    deparallelize(model)
    assert model.shared.weight is model.decoder.embed_tokens.weight


def test_splits_begin_blocks_of_their_own():
    fields = {
        "serialized_embedding_splits_per_ipu": [1, 3],
        "serialized_projection_splits_per_ipu": [0, 2],
    }
    model = parallelize(small("bert_classes", 2), config_of(**fields))
    assert begun(model) == {
        "bert.embeddings.word_embeddings.split_embeddings.0": 0,
        "bert.embeddings.word_embeddings.split_embeddings.1": 1,
        "bert.encoder.layer.0": 0,
        "bert.encoder.layer.1": 1,
    }  # nothing has a head to split, and the other embeddings run where the last table is
    model = parallelize(small("llama", 2), config_of(**fields))
    assert type(model.lm_head) is SplitProjection
    assert begun(model)["lm_head.split_linear_layers.0"] == 1


def test_an_embedding_that_scales_cannot_be_cut():
    model = small("bart", 2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(ValueError, match="BartScaledWordEmbedding may do more than look up"):
        parallelize(model, config_of(embedding_serialization_factor=2))


def test_lists_are_found_by_rule():
    paths = {
        "bert": ["bert.encoder.layer"],
        "distilbert": ["distilbert.transformer.layer"],
        "gpt2": ["transformer.h"],
        "t5": ["encoder.block", "decoder.block"],
        "vit": ["vit.layers"],
    }
    for name, found in paths.items():
        assert [one.path for one in find_layer_lists(small(name, 2))] == found

    class Home(nn.Module):
        def __init__(self, *lengths):
            super().__init__()
            self.pool = nn.ModuleList([nn.ReLU(), nn.ReLU()])
            self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])
            for number, length in enumerate(lengths):
                setattr(self, f"list{number}", nn.ModuleList(Block() for _ in range(length)))

    assert [one.path for one in find_layer_lists(Home(3, 1))] == ["list0"]
    with pytest.raises(ValueError, match=r"list0: 3 Block, list1: 2 Block.*layers=\"a.b\""):
        parallelize(Home(3, 2), config_of())
    with pytest.raises(ValueError, match=r"no list.*mixed: 2 Linear.*layers=\"a.b\""):
        parallelize(Home(1), config_of())
    with pytest.raises(ValueError, match=r"layers='list7': Home has no such module; .*list0: 3"):
        parallelize(Home(3), config_of(), layers="list7")
    with pytest.raises(ValueError, match=r"layers='list0.1' is a Block, no list"):
        parallelize(Home(3), config_of(), layers="list0.1")


@pytest.mark.parametrize("none", [[], ()])
def test_no_list_is_no_answer(none):
    with pytest.raises(ValueError, match=r"names no list; lists of TwoLists: late: 1 Block, early"):
        parallelize(TwoLists(2), config_of(), layers=none)


def test_only_modules_are_placed():
    wrapped = poptorch.inferenceModel(TwoLists(2))
    for function in (lambda model: parallelize(model, config_of()), deparallelize):
        with pytest.raises(TypeError, match="Module is needed, not PoplarExecutor: pass the model"):
            function(wrapped)


def test_given_lists_are_numbered_in_their_order():
    model = parallelize(TwoLists(4), config_of(), layers=["early", "late"])
    assert [begun(model)[f"{name}.0"] for name in ("early", "late")] == [0, 1]


def test_a_layer_is_named_once():
    model = TwoLists(4)
    with pytest.raises(ValueError, match=r"\['early', 'early'\] name early.0 twice"):
        parallelize(model, config_of(), layers=["early", "early"])
    model.other = nn.Sequential(model.early[1])
    with pytest.raises(ValueError, match=r"name other.0, which is early.1, twice"):
        parallelize(model, config_of(), layers=["early", "other"])
    model.outer = nn.Sequential(model.early)
    with pytest.raises(ValueError, match=r"name early.0, and outer.0 that it is in"):
        parallelize(model, config_of(), layers=["early", "outer"])
    assert not begun(model)


class Around(nn.Module):
    """A model whose layers stand in its lists, and run in its forward pass, as a test says."""

    def __init__(self, lists, runs=1):
        super().__init__()
        self.lists, self.runs = nn.ModuleDict(lists), runs
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(self.runs):
            for layer in self.lists["a"]:
                x = layer(x)
        return self.head(x).pow(2).mean()


def test_a_layer_that_stands_twice_is_on_one_ipu():
    layers = nn.ModuleList(Block() for _ in range(4))
    again = Around({"a": layers, "b": nn.ModuleList(layers)})
    again._no_split_modules = ("Block",)
    same = Around({"a": nn.ModuleList([layers[0]] * 4)})
    for model, words in (
        (again, "lists.a.0 on IPU 0 and lists.b.0 on IPU 1 are one layer"),
        (same, "lists.a.0 on IPU 0 and lists.a.2 on IPU 1 are one layer"),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize(model, config_of())
        assert not begun(model)
    assert begun(parallelize(same, config_of(layers_per_ipu=[0, 4]))) == {"lists.a.0": 1}


def test_a_list_has_several_paths():
    layers = nn.ModuleList(Block() for _ in range(2))
    model = parallelize(Around({"a": layers, "b": layers}), config_of(), layers="lists.b")
    assert begun(model) == {"lists.a.0": 0, "lists.a.1": 1}  # and the head stays where they end


def test_layers_that_run_again_are_stages_again(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    torch.manual_seed(1)
    model = Around({"a": nn.ModuleList(Block() for _ in range(2))}, runs=2)
    plain, x = copy.deepcopy(model), torch.randn(7, 4)
    config = config_of(gradient_accumulation_steps=7)
    parallelize(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, config.to_core_options(), loss=0)
    step(x)
    assert {v.ipu for v in step.program.variables if "lists.a.1" in v.name} == {1}
    sum(plain(row) / 7 for row in x.split(1)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_layers_that_are_not_called_are_named(monkeypatch, caplog):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")

    class Reads(Around):
        def forward(self, x):
            for layer in self.lists["a"]:
                x = layer.linear(x)
            return self.head(x)

    model = parallelize(Reads({"a": nn.ModuleList(Block() for _ in range(2))}), config_of())
    model(torch.ones(2, 4))
    assert not caplog.records
    compile_inference(model, Options())(torch.ones(2, 4))
    (text,) = [r.getMessage() for r in caplog.records if "Reads" in r.getMessage()]
    assert text.startswith("Reads does not call lists.a.0, lists.a.1: they begin no block")


@pytest.mark.parametrize("fields", FIELDS[1:], ids=str)
@pytest.mark.parametrize("fails", [True, False])
def test_weights_keep_their_memory_and_heads_their_attributes(fields, fails):
    model = small("llama", 2).share_memory()
    model.lm_head.factor = "mine"
    if fails:
        blocks.BeginBlock(model.model.layers[1], "mine")
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    if fails:
        with pytest.raises(ValueError, match="begins a block already"):
            parallelize(model, config_of(**fields))
    else:
        deparallelize(parallelize(model, config_of(**fields)))
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places
    assert all(weight.is_shared() for weight in model.parameters())
    assert model.lm_head.factor == "mine"
    assert not hasattr(model.lm_head, "mode")


def test_only_once_and_only_after(tmp_path):
    model = TwoLists(2)
    with pytest.raises(RuntimeError, match="is not parallelized"):
        deparallelize(model)
    parallelize(model, config_of(), layers=["early", "late"])
    with pytest.raises(RuntimeError, match="is parallelized already"):
        parallelize(model, config_of(), layers=["early", "late"])
    deparallelize(model)
    with pytest.raises(RuntimeError, match="is not parallelized"):
        deparallelize(model)


def test_a_copy_of_a_parallelized_model_says_what_it_is():
    model = copy.deepcopy(parallelize(TwoLists(2), config_of(), layers=["early", "late"]))
    with pytest.raises(RuntimeError, match=r"is a copy of a parallelized model.*: copy a"):
        deparallelize(model)
    with pytest.raises(RuntimeError, match="is a copy of a parallelized model"):
        parallelize(model, config_of(), layers=["early", "late"])


class _Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.layers[1].linear.weight = self.layers[0].linear.weight


@pytest.mark.parametrize(
    ("make", "fields", "kind", "words"),
    [
        (
            lambda: small("bert", 2),
            {"layers_per_ipu": [1, 3], "embedding_serialization_factor": 2},
            IncompatibleIPUConfigError,
            r"\[1, 3\] has 4, the model 2",
        ),
        (_Sharing, {}, ValueError, "layers.0 on IPU 0 and layers.1 on IPU 1 share the parameter"),
        (
            lambda: nn.Sequential(nn.ModuleList([Block(), blocks.BeginBlock(Block(), "mine")])),
            {},
            ValueError,
            "0.1 begins a block already",
        ),
    ],
)
def test_what_fails_leaves_the_model_as_it_was(make, fields, kind, words):
    model = make()
    before = snapshot(model)
    with pytest.raises(kind, match=words):
        parallelize(model, config_of(**fields))
    assert str(snapshot(model)) == str(before)
    with pytest.raises(RuntimeError, match="is not parallelized"):
        deparallelize(model)


def test_the_original_configuration_is_read():
    class IPUConfig:  # as Optimum Graphcore's
        mode = "inference"

        def to_dict(self):
            return {"inference_layers_per_ipu": [2, 0], "layers_per_ipu": [1, 1]}

    model = parallelize(TwoLists(2), IPUConfig(), layers=["early", "late"])
    assert begun(model)["late.0"] == 0
    with pytest.raises(TypeError, match="an IPUConfig is needed, got 3, a int"):
        parallelize(TwoLists(2), 3)
