"""Check what Keras' own files hold of options, stages and seeds; plain Keras reads them."""

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.extensions import Extension, plain_class
from ipu_dynamo.keras.private.keras_graphs import seed_variables
from ipu_dynamo.keras.stages.stage_plan import stage_plan
from tests.keras.stages.keras_graphs import D, Subclass, branches, fill, names, nesting

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")

KEYS = {
    "version", "gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method",
    "pipelining_gradient_accumulation_steps_per_replica", "pipelining_device_mapping",
    "pipelining_accumulate_outfeed", "replicated_metric_reduction_method",
    "asynchronous_callbacks", "infeed_kwargs", "outfeed_kwargs", "seed_states",
    "pipeline_stage_assignment", "pipeline_stage_assignment_valid",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _scope():
    with IPUStrategy(4).scope():
        yield


def subclass():
    model = Subclass()
    model.build((None, 3))
    return model


def sequential():
    layers = [D(3), keras.layers.Dropout(0.5), D(1)]
    return keras.Sequential([keras.Input((3,)), *layers])


CASES = {
    "functional": (branches, [0, 0, 1, 1]),
    "nested": (nesting, [0, 0, 1, 1, 2, 2]),
    "nested in a sequential": (lambda: nesting("sequential"), [0, 0, 1, 1]),
    "sequential": (sequential, [0, 1, 1]),
    "subclass": (subclass, [0, 0, 1, 1, 2]),
}


def with_options(name):
    make, stages = CASES[name]
    model = make()
    model.set_gradient_accumulation_options(3)
    model.set_pipelining_options(
        5, list(range(max(stages) + 1)), True, gradient_accumulation_reduction_method="mean"
    )
    model.set_replication_options("list")
    model.set_asynchronous_callbacks(True)
    model.set_infeed_queue_options(prefetch_depth=2)
    model.set_outfeed_queue_options(buffer_depth=4)
    model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), stages))
    for seed in seed_variables(model):
        seed.assign([7, 11])
    return model


def through_file(model, tmp_path):
    model.save(tmp_path / "m.keras")
    return keras.models.load_model(tmp_path / "m.keras", custom_objects={"Subclass": Subclass})


def through_json(model, tmp_path):
    return keras.models.model_from_json(model.to_json(), custom_objects={"Subclass": Subclass})


def through_config(model, tmp_path):
    return plain_class(type(model)).from_config(model.get_config())


def all_stages(assignment):
    return [
        all_stages(element.pipeline_stage_assignments)
        if element.is_nested_model
        else element.pipeline_stage
        for element in assignment
    ]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in CASES
        for way in (through_file, through_json, through_config)
        if (name, way) != ("subclass", through_config)  # whose configuration Keras does not read
    ],
)
def test_everything_comes_back(name, way, tmp_path):
    model = with_options(name)
    loaded = way(model, tmp_path)
    assert isinstance(loaded, Extension)
    assert state_of(loaded).settings == state_of(model).settings
    before, after = (m.get_pipeline_stage_assignment() for m in (model, loaded))
    assert all_stages(after) == all_stages(before)
    if name != "subclass":
        assert [row[0] for row in names(after)] == [row[0] for row in names(before)]
    assert stage_plan(loaded).num_stages == stage_plan(model).num_stages
    for seed in seed_variables(loaded):
        np.testing.assert_array_equal(seed.numpy(), [7, 11])
    assert len(seed_variables(loaded)) == (1 if name in ("sequential", "subclass") else 0)


@pytest.mark.parametrize("name", CASES)
def test_the_layout_is_one_json_value(name):
    model = with_options(name)
    config = model.get_build_config() if name == "subclass" else model.get_config()
    other = model.get_config() if name == "subclass" else model.get_build_config()
    stored = config["ipu"]
    assert "ipu" not in (other or {})
    assert stored.keys() == KEYS
    assert json.loads(json.dumps(stored)) == stored
    assert stored["version"] == 1
    assert stored["gradient_accumulation_reduction_method"] == "mean"
    assert stored["replicated_metric_reduction_method"] == "list"
    if name == "functional":
        rows = [["shared", 0, 0], ["shared", 1, 0], ["right", 0, 1], ["last", 0, 1]]
        assert stored["pipeline_stage_assignment"] == rows
    if name == "nested in a sequential":
        rows = [["first", 0, 0], ["inner", 0, [["a", 0, 0], ["b", 0, 1]]], ["last", 0, 1]]
        assert stored["pipeline_stage_assignment"] == rows


def test_a_new_model_stores_the_defaults():
    stored = branches().get_config()["ipu"]
    expected = dict.fromkeys(KEYS)
    expected |= {"version": 1, "gradient_accumulation_reduction_method": "sum"}
    expected |= {"replicated_metric_reduction_method": "none", "asynchronous_callbacks": False}
    expected |= {"infeed_kwargs": {}, "outfeed_kwargs": {}, "seed_states": []}
    expected |= {"pipeline_stage_assignment": [], "pipeline_stage_assignment_valid": True}
    assert stored == expected


LOAD = """
import sys, keras, numpy as np
folder, models, *names = sys.argv[1:]
sys.path.insert(0, models)
from keras_graphs import Subclass
x = np.load(f"{folder}/x.npy")
for name in names:
    objects = {"Subclass": Subclass}
    model = keras.models.load_model(f"{folder}/{name}.keras", custom_objects=objects)
    y = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(y, np.load(f"{folder}/{name}.npy"), rtol=1e-6)
assert not {"ipu_dynamo", "ipu_dynamo.keras"} & {*sys.modules}
"""


def test_plain_keras_loads_the_files(tmp_path):
    x = np.random.default_rng(0).random((2, 3), "float32")
    np.save(tmp_path / "x.npy", x)
    for name in CASES:
        model = with_options(name)
        np.save(tmp_path / f"{name}.npy", keras.ops.convert_to_numpy(model(x)))
        model.save(tmp_path / f"{name}.keras")
    arguments = [str(tmp_path), str(Path(__file__).parents[1] / "stages"), *CASES]
    subprocess.run([sys.executable, "-c", LOAD, *arguments], check=True)


def test_without_a_scope_a_file_is_a_plain_model(tmp_path):
    with_options("sequential").save(tmp_path / "m.keras")
    loaded = []

    def load():  # another thread is in no scope
        loaded.append(keras.models.load_model(tmp_path / "m.keras"))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert not isinstance(loaded[0], Extension)


def test_calls_in_other_graphs_are_not_counted(tmp_path):
    layer = D(1, name="shared")
    layer(keras.Input((3,)))
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(layer(D(3)(inputs)) * np.ones((1, 3), "float32")))
    assignment = fill(model.get_pipeline_stage_assignment(), [0, 1, 1])
    assert [element.node_index for element in assignment] == [0, 1, 2]
    model.set_pipeline_stage_assignment(assignment)
    loaded = through_file(model, tmp_path)
    assert names(loaded.get_pipeline_stage_assignment())[1:] == [("shared", 0), ("shared", 1)]


def test_layers_of_a_subclass_that_keras_names_are_found_again(tmp_path):
    class Unnamed(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.a, self.b = D(3), D(1)

        def call(self, x):
            return self.b(self.a(x))

    model = Unnamed()
    model.build((None, 3))
    model.set_pipeline_stage_assignment([0, 1])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Unnamed": Unnamed})
    assert loaded.a.name != model.a.name
    assert all_stages(loaded.get_pipeline_stage_assignment()) == [0, 1]


def test_weights_files_leave_seeds_alone(tmp_path):
    model = with_options("sequential")
    model.save_weights(tmp_path / "m.weights.h5")
    other = sequential()
    before = [seed.numpy() for seed in seed_variables(other)]
    other.load_weights(tmp_path / "m.weights.h5")
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for seed, state in zip(seed_variables(other), before, strict=True):
        np.testing.assert_array_equal(seed.numpy(), state)


def test_another_number_of_seeds_is_a_notice(caplog):
    config = with_options("sequential").get_config()
    config["ipu"]["seed_states"] *= 2
    with caplog.at_level(logging.WARNING, logger="ipu_dynamo.keras"):
        loaded = keras.Sequential.from_config(config)
    (record,) = caplog.records
    assert "has 1 seed generators, and its file holds the states of 2" in record.getMessage()
    assert seed_variables(loaded)[0].numpy().tolist() != [7, 11]


def test_a_newer_version_is_refused_with_both():
    config = with_options("sequential").get_config()
    config["ipu"]["version"] = 2
    with pytest.raises(ValueError, match=r"version 2 .* reads up to version 1"):
        keras.Sequential.from_config(config)


@pytest.mark.parametrize("name", CASES)
def test_an_assignment_that_does_not_fit_is_refused(name):
    model = with_options(name)
    config = keras.saving.serialize_keras_object(model)
    stored = config["build_config" if name == "subclass" else "config"]["ipu"]
    row = stored["pipeline_stage_assignment"][-1]
    row[0] = "foreign"
    with pytest.raises(ValueError, match=r"is no longer valid: .*foreign"):
        keras.saving.deserialize_keras_object(config, custom_objects={"Subclass": Subclass})
    stored["pipeline_stage_assignment"].pop()
    with pytest.raises(ValueError, match=r"is no longer valid: .*layer"):
        keras.saving.deserialize_keras_object(config, custom_objects={"Subclass": Subclass})


def test_an_assignment_from_before_a_change_is_refused():
    model = with_options("sequential")
    model.add(D(1))
    with pytest.raises(ValueError, match="is no longer valid"):
        keras.Sequential.from_config(model.get_config())


def test_keywords_are_not_stored_and_a_line_says_so(caplog):
    model = branches()
    model.set_pipelining_options(offload_weights=True)
    model.set_gradient_accumulation_options(dtype="float32")
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        config = model.get_config()
    assert [record.getMessage().split(" hold ")[1] for record in caplog.records] == [
        "dtype: call set_gradient_accumulation_options again after loading it",
        "offload_weights: call set_pipelining_options again after loading it",
    ]
    loaded = keras.Model.from_config(config)
    assert state_of(loaded).settings.pipelining_keywords == {}


def test_a_users_constructor_gets_no_foreign_key(tmp_path, caplog):
    class Own(keras.Model):
        def __init__(self, units, **kwargs):
            inputs = keras.Input((3,))
            super().__init__(inputs, D(units)(inputs), **kwargs)
            self.units = units

        def get_config(self):
            return {"units": self.units, "name": self.name}

    model = Own(2)
    model.set_infeed_queue_options(prefetch_depth=3)
    assert model.get_config() == {"units": 2, "name": model.name}
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Own": Own})
    assert isinstance(loaded, Own)
    (record,) = caplog.records
    assert "does not hold its options" in record.getMessage()
    assert state_of(loaded).settings.infeed_keywords == {}  # it is built by its constructor
