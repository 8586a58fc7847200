"""Train and run models that are placed by a configuration, beside plain ones."""

import logging

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo import compile_inference, compile_training
from ipu_dynamo.optimum import IPUConfig, deparallelize, get_layer_ipu, parallelize
from ipu_dynamo.optimum.placement.find_layers import find_layer_lists
from tests.optimum.small_models import SMALL, small

STEPS, ROWS = 5, 1
QUICK = ("bert", "gpt2", "t5", "two_lists")
CASES = [
    pytest.param(name, ipus, marks=[] if name in QUICK and ipus == 2 else pytest.mark.slow)
    for name in SMALL
    for ipus in (1, 2, 4)
]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


class Loss(nn.Module):
    """The loss alone, as training programs return it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        result = self.model(**inputs)
        return result[0] if isinstance(result, tuple) else result.loss


def training(door, model, config):
    """A program that trains a placed model, of poptorch or of the core."""
    if door == "poptorch":
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=1e-3)
        return poptorch.trainingModel(Loss(model), config.to_options(), optimizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return compile_training(Loss(model), optimizer, config.to_core_options(), loss=0)


def plain_training(model, batches, accumulation):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        for index in range(accumulation):
            part = {k: v[index * ROWS : (index + 1) * ROWS] for k, v in batch.items()}
            (Loss(model)(**part) / accumulation).backward()
        optimizer.step()


def ipus_of(program):
    """The IPU of each parameter by its name in the model."""
    return {
        variable.name.removeprefix("model."): variable.ipu
        for variable in program.variables
        if variable.kind == "parameter"
    }


def check_placement(model, lists, placed, config):
    layers = [(one, layer) for one in lists for layer in one.paths]
    for (_, path), ipu in zip(layers, get_layer_ipu(config, layers), strict=True):
        own = {name: where for name, where in placed.items() if name.startswith(f"{path}.")}
        assert own, path
        assert set(own.values()) == {ipu}
    table = getattr(model, "get_input_embeddings", lambda: None)()
    for name, parameter in model.named_parameters():
        if table is not None and parameter is getattr(table, "weight", None):
            assert placed[name] == 0


def train(name, ipus, door, **fields):
    """A trained model, restored, and the program that trained it."""
    one = SMALL[name]
    accumulation = 16 if (one.tied and ipus > 1) or "splits" in str(fields) else 8
    config = IPUConfig(
        ipus_per_replica=ipus,
        gradient_accumulation_steps=accumulation,
        enable_half_partials=False,
        **fields,
    )
    model, plain = small(name, max(2, ipus)), small(name, max(2, ipus))
    torch.manual_seed(2)
    batches = [one.batch(ROWS * accumulation) for _ in range(STEPS)]
    lists = find_layer_lists(model, one.layers)
    assert parallelize(model, config, layers=one.layers) is model
    step = training(door, model, config)
    for batch in batches:
        step(**batch)
    if door == "poptorch":
        step.copyWeightsToHost()
        program = step._core.program
        step.destroy()
    else:
        program = step.program
    if not fields:
        check_placement(model, lists, ipus_of(program), config)
    deparallelize(model)
    plain_training(plain, batches, accumulation)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-4)
    moved = small(name, max(2, ipus)).state_dict()
    assert not all(torch.equal(moved[key], value) for key, value in plain.state_dict().items())
    return program


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_training_is_that_of_the_plain_model(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "inductor")
    train("bert", 2, "core")


@pytest.mark.few(2)
@pytest.mark.parametrize("door", ["poptorch", "core"])
@pytest.mark.parametrize(("name", "ipus"), CASES)
def test_training_is_that_of_the_plain_model(name, ipus, door):
    program = train(name, ipus, door)
    assert program.num_ipus == ipus


PARTS = {
    "embedding factor": {"embedding_serialization_factor": 4},
    "projection factor": {"projection_serialization_factor": 2},
    "checkpoints": {"recompute_checkpoint_every_layer": True},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(
            name, door, marks=[] if (name, door) == ("llama", "core") else pytest.mark.slow
        )
        for name in SMALL
        if name not in ("vit", "two_lists")
        for door in ("poptorch", "core")
    ],
)
def test_training_in_parts_is_that_of_the_plain_model(name, door, what):
    train(name, 2, door, **PARTS[what])


def test_splits_are_on_their_ipus():
    fields = {
        "serialized_embedding_splits_per_ipu": [1, 3],
        "serialized_projection_splits_per_ipu": [2, 1],
    }
    program = train("llama", 2, "core", **fields)
    parts = {name: ipu for name, ipu in ipus_of(program).items() if "split" in name}
    tables = [ipu for name, ipu in parts.items() if "embedding" in name]
    layers = [ipu for name, ipu in parts.items() if "linear" in name]
    assert (tables, layers) == ([0, 1, 1, 1], [0, 0, 1])


def run_inference(name, door, **fields):
    one = SMALL[name]
    config = IPUConfig(ipus_per_replica=2, enable_half_partials=False, **fields).eval()
    model, plain = small(name, 2).eval(), small(name, 2).eval()
    inputs = one.batch(2 * config.batch_size_factor(for_inference=True))
    labels = inputs.pop("labels")
    if name in ("t5", "bart"):  # which take the decoder's tokens from nowhere else
        inputs["decoder_input_ids"] = labels
    parallelize(model, config, layers=one.layers)
    if door == "poptorch":
        step = poptorch.inferenceModel(model, config.to_options(for_inference=True))
    else:
        step = compile_inference(model, config.to_core_options(for_inference=True))
    result, expected = step(**inputs), plain(**inputs)
    result = getattr(result, "logits", result)
    torch.testing.assert_close(result, getattr(expected, "logits", expected), rtol=0, atol=1e-5)
    program = (step._core if door == "poptorch" else step).program
    assert program.num_ipus == 2
    return program


@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(
            name,
            door,
            marks=[]
            if (name, door) in (("bert", "core"), ("two_lists", "poptorch"))
            else pytest.mark.slow,
        )
        for name in SMALL
        for door in ("poptorch", "core")
    ],
)
def test_inference_with_defaults_runs_sharded_and_says_so_once(name, door, caplog):
    with caplog.at_level(logging.WARNING, "ipu_dynamo"):
        program = run_inference(name, door)
    assert program.order == "sequential"
    told = [r for r in caplog.records if "inference_device_iterations=" in r.getMessage()]
    assert len(told) == 1


def test_inference_with_iterations_is_a_pipeline():
    assert run_inference("two_lists", "core", inference_device_iterations=2).order == "pipelined"
    fields = {"inference_device_iterations": 2, "sharded_execution_for_inference": True}
    assert run_inference("two_lists", "core", **fields).order == "sequential"
