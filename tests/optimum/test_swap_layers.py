"""Check what becomes of all else that layers have, where parts stand for them."""

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.optimum import (
    IPUConfig,
    SerializedEmbedding,
    SplitProjection,
    deparallelize,
    parallelize,
)
from tests.optimum.small_models import SMALL, Block, small
from tests.optimum.test_models import Loss, plain_training, training


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


TABLES = {"embedding_serialization_factor": 4}
HEADS = {"serialized_projection_splits_per_ipu": [0, 3]}


def config_of(**fields):
    return IPUConfig(ipus_per_replica=2, enable_half_partials=False, **fields)


def layer_of(model, fields):
    return model.model.embed_tokens if fields is TABLES else model.lm_head


@pytest.mark.parametrize("fields", [TABLES, HEADS], ids=["tables", "heads"])
def test_hooks_of_a_layer_run_for_its_parts(fields):
    model, inputs = small("llama", 2), SMALL["llama"].batch(2)
    plain = model(**inputs).loss
    layer, seen = layer_of(model, fields), []
    doubled = layer.register_forward_hook(lambda module, args, output: 2 * output)
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    expected = model(**inputs).loss
    assert not torch.equal(expected, plain)
    parallelize(model, config_of(**fields))
    parts = layer_of(model, fields)
    assert type(parts) is not type(layer)
    torch.testing.assert_close(model(**inputs).loss, expected)
    parts.register_forward_pre_hook(lambda *_: seen.append("forward"))
    doubled.remove()  # its handle acts on the parts
    loss = model(**inputs).loss
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert seen == ["forward", "backward"]
    deparallelize(model)
    assert layer_of(model, fields) is layer
    model(**inputs)
    assert seen == ["forward", "backward", "forward"]
    assert not parts._forward_pre_hooks


def test_one_of_several_owners_with_hooks_is_refused():
    model = small("t5", 2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.decoder.embed_tokens = nn.Embedding(*model.shared.weight.shape)
    model.decoder.embed_tokens.weight = model.shared.weight
    model.decoder.embed_tokens.register_forward_hook(lambda *_: None)
    words = "decoder.embed_tokens.* give way to one layer in parts, and decoder.embed_tokens has h"
    with pytest.raises(ValueError, match=words):
        parallelize(model, config_of(**TABLES))
    assert type(model.shared) is nn.Embedding


def _with_weight_norm(layer):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)


MORE = {
    "a weight that is computed from other parameters": _with_weight_norm,
    "the parameter scale": lambda layer: layer.register_parameter(
        "scale", nn.Parameter(torch.ones(1))
    ),
    "the module adapter": lambda layer: layer.register_module("adapter", nn.Identity()),
    "the buffer kept": lambda layer: layer.register_buffer("kept", torch.ones(1)),
    "a forward of its own": lambda layer: setattr(layer, "forward", lambda x: x),
    "hooks on its weight": lambda layer: layer.weight.register_hook(lambda grad: 2 * grad),
}


@pytest.mark.parametrize("fields", [TABLES, HEADS], ids=["tables", "heads"])
@pytest.mark.parametrize("what", MORE)
def test_a_layer_that_is_more_is_not_replaced(what, fields):
    model = small("llama", 2)
    MORE[what](layer_of(model, fields))
    with pytest.raises(ValueError, match=f"with .*{what}.* cannot be replaced by parts"):
        parallelize(model, config_of(**fields))
    deparallelize(parallelize(model, config_of(projection_serialization_factor=2)))  # stays itself


@pytest.mark.parametrize("fields", [HEADS, {"projection_serialization_factor": 2}], ids=str)
@pytest.mark.parametrize("new", [lambda: nn.Sequential(nn.Linear(8, 5)), lambda: None])
def test_what_a_user_puts_in_the_place_of_parts_stays_there(fields, new):
    model, layer = small("llama", 2), new()
    head = model.lm_head
    parallelize(model, config_of(**fields))
    if layer is None:
        del model.lm_head
    else:
        model.lm_head = layer
    deparallelize(model)
    assert getattr(model, "lm_head", None) is layer
    assert type(head) is nn.Linear
    assert not {"factor", "mode"} & vars(head).keys()
    assert not model.model.layers[0]._forward_pre_hooks


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fields", "door"),
    [
        pytest.param(TABLES, "poptorch", id="tables-poptorch"),
        pytest.param(TABLES, "core", id="tables-core", marks=pytest.mark.slow),
        pytest.param(HEADS, "poptorch", id="heads-poptorch", marks=pytest.mark.slow),
        pytest.param(HEADS, "core", id="heads-core"),
    ],
)
def test_programs_of_both_modes_share_the_parts(door, fields):
    """As trainers do: train, place for inference, run, and train on with the first program."""
    config = config_of(
        gradient_accumulation_steps=8, **fields, **{f"inference_{k}": v for k, v in fields.items()}
    )
    model = small("llama", 2)
    parallelize(model, config)
    step = training(door, model, config)
    run, inputs = None, SMALL["llama"].batch(1)["input_ids"]
    batches = [SMALL["llama"].batch(8) for _ in range(3)]
    for count, batch in enumerate(batches, start=1):
        step(**batch)
        again = small("llama", 2)
        plain_training(again, batches[:count], 8)
        deparallelize(model)
        torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=0, atol=1e-4)
        parallelize(model, config.eval())
        if door == "poptorch":
            model.eval()
            run = run or poptorch.inferenceModel(model, config.to_options(for_inference=True))
            torch.testing.assert_close(run(inputs).logits, again(inputs).logits, rtol=0, atol=1e-3)
        deparallelize(model)
        parallelize(model.train(), config.train())


def test_programs_of_other_parts_get_the_weights_that_are_copied():
    """By PopTorch's rule for weights that change on the host."""
    config = config_of(gradient_accumulation_steps=8, **TABLES)
    model, inputs = small("llama", 2), SMALL["llama"].batch(1)["input_ids"]
    optimizer = poptorch.optim.AdamW(parallelize(model, config).parameters(), lr=1e-2)
    step = poptorch.trainingModel(Loss(model), config.to_options(), optimizer)
    run = None
    for _ in range(2):
        step(**SMALL["llama"].batch(8))
        parallelize(deparallelize(model).eval(), config.eval())
        run = run or poptorch.inferenceModel(model, config.to_options(for_inference=True))
        if run.isCompiled():
            run.copyWeightsToDevice()
        torch.testing.assert_close(run(inputs).logits, model(inputs).logits)
        parallelize(deparallelize(model).train(), config.train())


def test_parts_that_something_has_come_back_with_the_weights_of_now():
    model = small("llama", 2)
    parallelize(model, config_of(**TABLES))
    first = layer_of(model, TABLES)
    deparallelize(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.model.embed_tokens.requires_grad_(False).eval()
    parallelize(model, config_of(**TABLES))
    assert layer_of(model, TABLES) is first
    assert torch.equal(first.whole_weight(), small("llama", 2).model.embed_tokens.weight + 1)
    assert not any(p.requires_grad for p in first.parameters())
    assert not any(module.training for module in first.modules())
    deparallelize(model)
    for factor, kind in ((3, torch.float32), (4, torch.float64)):
        parallelize(model.to(kind), config_of(embedding_serialization_factor=factor))
        assert layer_of(model, TABLES) is not first
        assert layer_of(model, TABLES).split_embeddings[0].weight.dtype is kind
        deparallelize(model)


def test_parts_that_stand_in_one_model_are_not_taken_by_another():
    class Net(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table, self.layers = table, nn.ModuleList(Block() for _ in range(2))

        def get_input_embeddings(self):
            return self.table

    table = nn.Embedding(8, 4)
    splits = config_of(serialized_embedding_splits_per_ipu=[1, 1])
    one, two = (parallelize(Net(table), splits) for _ in range(2))
    assert one.table is not two.table
    deparallelize(two)
    assert two.table is table
    assert type(one.table) is SerializedEmbedding
    deparallelize(one)


def test_a_projection_takes_the_weights_of_the_whole_one():
    whole = nn.Linear(3, 7)
    parts = SplitProjection.filled_up(whole, 4)
    assert parts.can_take(whole, 4)
    assert not parts.can_take(whole, 2)
    assert not parts.can_take(nn.Linear(3, 7, bias=False), 4)
    assert not parts.can_take(nn.Linear(3, 7).double(), 4)
    nn.init.normal_(whole.weight)
    nn.init.normal_(whole.bias)
    whole.weight.requires_grad_(False)
    parts.take(whole.eval())
    torch.testing.assert_close(parts.to_model().state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert [p.requires_grad for p in parts.parameters()] == [True, False, False, False, False]
    assert not parts.training
