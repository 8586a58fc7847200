"""Check that exported models give predict's numbers, here and by the command, pipelined too."""

import json
import logging

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras import IPUStrategy, extend, ipu
from ipu_dynamo.saved_model.command.main import main
from tests.keras.stages.keras_graphs import D, fill

BATCH = 4

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")


def functional(batch_size=None):
    inputs = keras.Input((3,), batch_size=batch_size, name="point")
    hidden = D(4, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.5)(hidden) + 1.0
    return keras.Model(inputs, D(2, name="logits")(hidden))


def sequential():
    layers = [D(4), keras.layers.Reshape((2, 2)), keras.layers.Flatten(), D(2)]
    return keras.Sequential([keras.Input((3,), name="point"), *layers])


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = D(4, activation="tanh"), D(2)

    def call(self, x):
        return self.b(self.a(x) * 2.0)


def subclass():
    model = Subclass()
    model.build(keras.Input((3,), name="point"))
    return model


CASES = {
    "functional": (functional, [0, 1, 1]),
    "sequential": (sequential, [0, 0, 1, 1]),
    "subclass": (subclass, [0, 1]),
}


def rows(count=2 * BATCH):
    return np.random.default_rng(0).normal(size=(count, 3)).astype("float32")


def run_by_command(folder, tmp_path, **arrays):
    """What `ipu-saved-model run` writes."""
    pairs = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        pairs.append(f"{name}={tmp_path / name}.npy")
    out = tmp_path / "out"
    options = ["--dir", str(folder), "--tag_set", "serve", "--signature_def", "serving_default"]
    code = main(["run", *options, "--inputs", ";".join(pairs), "--outdir", str(out)])
    assert not code
    return {path.stem: np.load(path) for path in out.iterdir()}


@pytest.mark.few(3)
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_export_gives_what_predict_does(name, pipelined, tmp_path, capsys):
    make, stages = CASES[name]
    x, folder = rows(), tmp_path / "exported"
    with IPUStrategy(1 + pipelined).scope():
        model = make()
        model.compile("sgd", "mse", steps_per_execution=2)
        if pipelined:
            assignment = fill(model.get_pipeline_stage_assignment(), stages)
            model.set_pipeline_stage_assignment(assignment)
        run = model.export_for_ipu_serving(folder, batch_size=BATCH)
        assert capsys.readouterr().out == ""
        expected = model.predict(x, batch_size=BATCH, verbose=0)
    (output,) = run(x).values()
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    inputs = json.loads((folder / "saved_model.json").read_text())["meta_graphs"][0]
    (input_name,) = inputs["signature_defs"]["serving_default"]["inputs"]
    assert input_name == ("x" if name == "subclass" else "point")
    (written,) = run_by_command(folder, tmp_path, **{input_name: x}).values()
    np.testing.assert_allclose(written, expected, rtol=1e-5, atol=1e-6)


def test_the_layout_and_what_is_recorded(tmp_path):
    with IPUStrategy(2).scope():
        model = functional()
        model.compile("sgd", "mse", steps_per_execution=3)
        model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), [0, 1, 1]))
        ipu.serving.export_keras(model, tmp_path / "exported", BATCH)
    for name in (
        "saved_model.json",
        "programs/serve/serving_default.pt2",
        "assets/application.ipu_exec",
        "assets/application.json",
    ):
        assert (tmp_path / "exported" / name).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
    described = json.loads((tmp_path / "exported/assets/application.json").read_text())
    assert (described["batch_size"], described["batch_per_step"]) == (BATCH, 3)
    assert described["num_ipus"] == 2
    assert described["pipeline"]["device_mapping"] == [0, 1]


def test_two_steps_run_on_the_host(tmp_path):
    model = extend(functional())
    run = model.export_for_ipu_serving(
        tmp_path / "exported",
        BATCH,
        preprocessing_step=lambda x: x * 0.5,
        postprocessing_step=lambda y: {"probabilities": y.softmax(-1), "class": y.argmax(-1)},
    )
    x = torch.from_numpy(rows())
    expected = model(x * 0.5)
    results = run(point=x)
    torch.testing.assert_close(results["probabilities"], expected.softmax(-1).detach())
    assert torch.equal(results["class"], expected.argmax(-1))
    index = json.loads((tmp_path / "exported/saved_model.json").read_text())
    entry = index["meta_graphs"][0]["signature_defs"]["serving_default"]
    devices = {
        node.split("/")[0]: part["device"]
        for part in entry["placement"]["partitions"]
        for node in part["nodes"]
    }
    assert devices["preprocessing"] == devices["postprocessing"] == "host"
    assert "ipu" in devices.values()


def test_several_inputs_and_names_of_outputs(tmp_path):
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = extend(keras.Model({"a": a, "b": b}, [D(1)(a + b), D(2)(b)]))
    run = model.export_for_ipu_serving(tmp_path / "exported", BATCH, ["one", "two"])
    x, y = rows(), rows() + 1
    one, two = model({"a": x, "b": y})
    results = run(b=y, a=x)
    np.testing.assert_allclose(results["one"], one.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["two"], two.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="output_names has 1 names, one, and there are 2 outputs"):
        model.export_for_ipu_serving(tmp_path / "other", BATCH, "one")
    assert not (tmp_path / "other").exists()


def test_a_layer_that_asks_for_the_rows_fixes_them(tmp_path, caplog):
    layers = [keras.layers.Embedding(7, 3, mask_zero=True), keras.layers.LSTM(2)]
    inputs = keras.Input((3,), dtype="int32", name="tokens")
    model = extend(keras.Sequential([inputs, *layers]))
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        run = model.export_for_ipu_serving(tmp_path / "exported", BATCH)
    assert "takes 4 rows only" in caplog.records[-1].getMessage()
    tokens = np.random.default_rng(0).integers(0, 7, (BATCH, 3)).astype("int32")
    (output,) = run(tokens=tokens).values()
    np.testing.assert_allclose(output, model(tokens).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"shape \[8, 3\], not \[4, 3\]"):
        run(tokens=np.concatenate([tokens, tokens]))


def test_a_fixed_batch_size_is_known(tmp_path):
    model = extend(functional(batch_size=BATCH))
    run = model.export_for_ipu_serving(tmp_path / "exported")
    x = rows(BATCH)
    np.testing.assert_allclose(run(x)["logits"], model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"there are \[4, 8\]"):
        model.export_for_ipu_serving(tmp_path / "other", 8)


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_batch_size_is_a_positive_integer(size, tmp_path):
    with pytest.raises(ValueError, match=r"batch_size is .*positive integer"):
        extend(functional()).export_for_ipu_serving(tmp_path / "exported", size)


def test_an_unknown_batch_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch size .* is unknown, its inputs have none: give"):
        extend(functional()).export_for_ipu_serving(tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_refused_or_replaced(tmp_path):
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "mine").write_text("kept")
    model = extend(functional())
    with pytest.raises(ValueError, match="is not empty: choose another"):
        model.export_for_ipu_serving(folder, BATCH)
    assert (folder / "mine").read_text() == "kept"
    model.export_for_ipu_serving(folder, BATCH, purge_export_dir=True)
    assert not (folder / "mine").exists()
    assert (folder / "saved_model.json").is_file()


def test_what_is_not_extended_or_not_built_is_refused(tmp_path):
    with pytest.raises(TypeError, match="is no extended model"):
        ipu.serving.export_keras(functional(), tmp_path / "exported", BATCH)
    for model in (Subclass(), keras.Sequential([D(2)])):
        with pytest.raises(RuntimeError, match="has not been built yet"):
            extend(model).export_for_ipu_serving(tmp_path / "exported", BATCH)


def test_a_variable_that_is_none_of_the_model_s_is_served(tmp_path):
    with IPUStrategy().scope():
        factor = keras.Variable(3.0, trainable=False)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Activation(lambda x: x * factor)])
        run = model.export_for_ipu_serving(tmp_path / "out", batch_size=2)
        values = np.ones((4, 2), "float32")
        (result,) = run(values).values()
        np.testing.assert_allclose(result, values * 3)
