"""Check that every field of a configuration changes something: a program, a result or a file."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo import compile_inference, compile_training
from ipu_dynamo.optimum import IPUConfig, parallelize
from ipu_dynamo.optimum.values.fields import fields_of

WIDTH, WORDS = 96, 12  # so wide that state is worth sharing out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.two(torch.tanh(self.one(x))))


class Net(nn.Module):
    """A language model that has all that a configuration speaks of."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, labels=None):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head


def run(config: IPUConfig, *, inference: bool, half: bool = False, calls: bool = False) -> Any:
    """The program that a configuration makes of the model, or what its second call returns."""
    torch.manual_seed(0)
    model = Net().half() if half else Net()
    config.mode = "inference" if inference else "training"
    parallelize(model, config)
    options = config.to_core_options(for_inference=inference)
    rows = config.batch_size_factor(for_inference=inference)
    torch.manual_seed(1)
    x, labels = torch.randint(0, WORDS, (2, rows, 2))
    if inference:
        step = compile_inference(model.eval(), options)
        step.compile(x)
        return str(step.program)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = compile_training(model, optimizer, options, loss=0)
    if not calls:
        step.compile(x, labels)
        return str(step.program)
    step(x, labels)
    return step(x, labels)


@dataclass(frozen=True)
class Change:
    """Another value of a field, beside fields that give it a meaning.

    Args:
        shows: in the "program", in the "result", in options as they are "recorded", or only in
            the "file".
    """

    value: Any
    shows: str = "program"
    given: dict[str, Any] = field(default_factory=dict)
    half: bool = False


PIPELINE = {"gradient_accumulation_steps": 3}
CHANGES = {
    "seed": Change(1, "result"),
    "replication_factor": Change(2),
    "inference_replication_factor": Change(2),
    "gradient_accumulation_steps": Change(4),
    "device_iterations": Change(2),
    "inference_device_iterations": Change(3),
    "layers_per_ipu": Change([2, 1]),
    "inference_layers_per_ipu": Change([2, 1]),
    "ipus_per_replica": Change(1),
    "inference_ipus_per_replica": Change(1),
    "matmul_proportion": Change([0.1, 0.2], "recorded"),
    "inference_matmul_proportion": Change([0.1, 0.2], "recorded"),
    "optimizer_state_offchip": Change(False),
    "sharded_execution_for_inference": Change(True, given={"inference_device_iterations": 2}),
    "replicated_tensor_sharding": Change(True, given={"replication_factor": 2}),
    "enable_half_partials": Change(False, half=True),
    "embedding_serialization_factor": Change(3),
    "inference_embedding_serialization_factor": Change(3),
    "projection_serialization_factor": Change(3),
    "inference_projection_serialization_factor": Change(3),
    "serialized_embedding_splits_per_ipu": Change([2, 0]),
    "inference_serialized_embedding_splits_per_ipu": Change([2, 0]),
    "serialized_projection_splits_per_ipu": Change([0, 2]),
    "inference_serialized_projection_splits_per_ipu": Change([0, 2]),
    "recompute_checkpoint_every_layer": Change(True, given={"layers_per_ipu": [2, 1]}),
    "output_mode": Change("all", "result"),
    "auto_loss_scaling": Change(True, half=True),
    "executable_cache_dir": Change("folder", "folder"),
    "explicit_ir_inference": Change(True, "recorded"),
    "parallelize_kwargs": Change({"for_generation": True}, "file"),
    "inference_parallelize_kwargs": Change({"for_generation": True}, "file"),
    "execute_encoder_on_cpu_for_generation": Change(True, "file"),
}


def of_inference(name: str) -> bool:
    return "inference" in name


def config_with(one: Change, **more: Any) -> IPUConfig:
    return IPUConfig(**{"seed": 0, "ipus_per_replica": 2, **PIPELINE, **one.given, **more})


def test_there_is_a_change_for_every_field():
    assert CHANGES.keys() == fields_of(IPUConfig).keys()


@pytest.fixture(scope="module")
def before():
    """What comes of the configurations that tests change, once for all of them."""
    known: dict[str, Any] = {}

    def of(one: Change, inference: bool) -> Any:
        key = f"{one.given} {one.half} {one.shows} {inference}"
        if key not in known:
            known[key] = shown(one, inference)
        return known[key]

    return of


def shown(one: Change, inference: bool, **more: Any) -> Any:
    calls = one.shows == "result"
    return run(config_with(one, **more), inference=inference, half=one.half, calls=calls)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [n for n, one in CHANGES.items() if one.shows == "program"])
def test_a_field_changes_the_program(name, before, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    one, given = CHANGES[name], {name: CHANGES[name].value}
    if name == "ipus_per_replica":
        given["inference_ipus_per_replica"] = 2
    assert shown(one, of_inference(name), **given) != before(one, of_inference(name))
    other = not of_inference(name)
    assert name != "inference_layers_per_ipu" or shown(one, other, **given) == before(one, other)


@pytest.mark.parametrize("name", [n for n, one in CHANGES.items() if one.shows == "result"])
def test_a_field_changes_results(name, before, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    one = CHANGES[name]
    result, changed = before(one, False), shown(one, False, **{name: one.value})
    assert changed.shape != result.shape or not torch.equal(changed, result)
    assert torch.equal(result, shown(one, False))  # it is the field that makes the difference


@pytest.mark.parametrize("name", [n for n, one in CHANGES.items() if one.shows == "recorded"])
def test_a_field_is_recorded_until_something_reads_it(name):
    one, inference = CHANGES[name], of_inference(name)
    plain = config_with(one).to_options(for_inference=inference).toDict()
    changed = config_with(one, **{name: one.value}).to_options(for_inference=inference).toDict()
    key = "enableExplicitIR" if "explicit" in name else "available_memory_proportion"
    assert changed[key] == ({0: 0.1, 1: 0.2} if "matmul" in name else True)
    assert {k: v for k, v in changed.items() if k != key} == {
        k: v for k, v in plain.items() if k != key
    }


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_the_file(name):
    one = CHANGES[name]
    config = IPUConfig(**{"ipus_per_replica": 2, **one.given, name: one.value})
    written = json.loads(config.to_json_string())
    assert written[name] == one.value
    assert IPUConfig.from_dict(written) == config


def test_programs_are_kept_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    for folder, kept in (("disabled", False), (str(tmp_path / "own"), True)):
        monkeypatch.chdir(tmp_path)
        options = IPUConfig(executable_cache_dir=folder).to_options(for_inference=True)
        poptorch.inferenceModel(nn.Linear(2, 2), options)(torch.ones(1, 2))
        assert any(tmp_path.rglob("*")) == kept
