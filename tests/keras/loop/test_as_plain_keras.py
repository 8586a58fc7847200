"""Check that fits with callbacks which steer them and write files are those of plain Keras."""

import csv
from pathlib import Path

import keras
import numpy as np
import pytest

import ipu_dynamo
from ipu_dynamo.keras import IPUStrategy

BATCH, EPOCHS, ROWS = 2, 12, 48


def data(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 4)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True)).astype("float32")
    return x, y


def model_of(rate, steps=1):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh", name="first")(inputs)
    hidden = keras.layers.Dense(8, activation="relu", name="second")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(hidden), name="net")
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def callbacks(folder):
    return [
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.02, cooldown=0),
        keras.callbacks.EarlyStopping(patience=3, min_delta=0.02, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(folder / "{epoch:02d}.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            folder / "{epoch:02d}.weights.h5", save_weights_only=True, save_freq="epoch"
        ),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]


def fitted(model, folder, batch_size, **kwargs):
    x, y = data(ROWS, 0)
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=data(ROWS, 1),
        validation_batch_size=batch_size,
        callbacks=callbacks(folder),
        verbose=0,
        **kwargs,
    )
    return history


def rows_of(path, scale):
    with Path(path).open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    return [row | {"learning_rate": row["learning_rate"] * scale} for row in rows]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("accumulation", "replicas", "stages", "asynchronous", "extra"),
    [
        (1, 1, None, False, {}),
        (3, 2, None, True, {}),
        (3, 2, [0, 0, 1], True, {}),
        (6, 1, [0, 1, 1], False, {"accumulate_outfeed": True}),
        pytest.param(2, 1, None, True, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, None, True, {}, marks=pytest.mark.slow),
        pytest.param(3, 2, None, False, {}, marks=pytest.mark.slow),
        pytest.param(3, 1, [0, 0, 1], False, {}, marks=pytest.mark.slow),
        pytest.param(6, 1, [0, 1, 1], True, {"accumulate_outfeed": True}, marks=pytest.mark.slow),
    ],
)
def test_steering_callbacks_and_files(
    tmp_path, accumulation, replicas, stages, asynchronous, extra
):
    rate = 0.02 * accumulation * replicas
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    plain = model_of(rate)
    expected = fitted(plain, theirs, BATCH * accumulation * replicas)
    steps = 6 if replicas * accumulation <= 6 else 12
    ipus = replicas * (2 if stages else 1)
    with IPUStrategy(ipus).scope():
        model = model_of(rate / replicas, steps)
        options = {"gradient_accumulation_reduction_method": "mean"}
        if stages is None:
            model.set_gradient_accumulation_options(accumulation, **options)
        else:
            model.set_pipelining_options(accumulation, **options, **extra)
            assignment = model.get_pipeline_stage_assignment()
            for element, stage in zip(assignment, stages, strict=True):
                element.pipeline_stage = stage
            model.set_pipeline_stage_assignment(assignment)
        model.set_replication_options("mean")
        model.set_asynchronous_callbacks(asynchronous)
        history = fitted(model, ours, BATCH)
    program = [p for p in ipu_dynamo.programs() if p.kind == "training"][-1]
    assert program.num_stages == (2 if stages else 1)
    assert program.replicas == replicas
    tolerance = 1e-5 if replicas == 1 else 1e-3
    assert 3 < len(expected.epoch) < EPOCHS  # the early stop came
    assert len(set(expected.history["learning_rate"])) > 1  # and a smaller rate
    assert history.epoch == expected.epoch
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        scale = replicas if name == "learning_rate" else 1
        np.testing.assert_allclose(
            np.multiply(history.history[name], scale), values, rtol=tolerance, err_msg=name
        )
    for mine, plains in zip(
        rows_of(ours / "log.csv", replicas), rows_of(theirs / "log.csv", 1), strict=True
    ):
        assert mine == pytest.approx(plains, rel=tolerance)
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    for file in theirs.glob("*.keras"):
        for mine, plains in zip(
            keras.models.load_model(ours / file.name).get_weights(),
            keras.models.load_model(file).get_weights(),
            strict=True,
        ):
            np.testing.assert_allclose(mine, plains, rtol=tolerance * 10, atol=tolerance / 10)
    for mine, plains in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, plains, rtol=tolerance * 10, atol=tolerance / 10)
