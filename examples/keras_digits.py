"""Train a Keras model on handwritten digits as a 2-stage pipeline of virtual IPUs.

The program is Keras 3 with stages and a strategy's scope. Beside it the same training runs in plain
Keras, on the same batches, to compare losses, weights, predictions and speed.
"""

import argparse
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import ipu_dynamo
from ipu_dynamo.keras import IPUStrategy

import keras  # behind `ipu_dynamo.keras`, which chooses Keras' torch backend  # isort: skip

BATCH = 8
ACCUMULATION = 8
STEPS = 16  # of an execution: two updates
RATE = 0.5
Arrays = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Arrays, Arrays]:
    """1,797 digits that come with scikit-learn: 1,408 to train on, 384 held back."""
    digits = load_digits()
    images = digits.images.astype("float32")[..., None] / 16
    order = np.random.default_rng(3).permutation(len(images))
    train, held_back = order[:1408], order[1408:1792]
    return (images[train], digits.target[train]), (images[held_back], digits.target[held_back])


def network() -> Any:
    """A convolution on the first stage, two dense layers on the second, where stages are."""
    keras.utils.set_random_seed(1)
    images = keras.Input((8, 8, 1))
    h = keras.layers.Conv2D(16, 3, padding="same", activation="tanh", name="convolution")(images)
    h = keras.layers.Flatten(name="flat")(keras.layers.AveragePooling2D(2, name="pool")(h))
    h = keras.layers.Dense(64, activation="tanh", name="hidden")(h)
    return keras.Model(images, keras.layers.Dense(10, name="scores")(h), name="digits")


def compiled(model: Any, steps_per_execution: int = 1) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(RATE, momentum=0.5),
        loss,
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def pipelined() -> Any:
    """The network for two virtual IPUs."""
    model = network()
    assignment = model.get_pipeline_stage_assignment()
    for element in assignment:
        element.pipeline_stage = int(element.layer.name in ("hidden", "scores"))
    model.set_pipeline_stage_assignment(assignment)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=ACCUMULATION,
        gradient_accumulation_reduction_method="mean",
    )
    return compiled(model, STEPS)


def largest_difference(ours: Any, theirs: Any) -> float:
    """Over all weights, the largest max |difference| / max |value|."""
    pairs = zip(ours.get_weights(), theirs.get_weights(), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def fitted(model: Any, batch_size: int, train: Arrays, held_back: Arrays, epochs: int) -> Any:
    """The history, and the seconds of the epochs behind the first, which compiles."""
    begins: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(time.perf_counter())
    )
    history = model.fit(
        *train,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        validation_data=held_back,
        validation_batch_size=BATCH,
        callbacks=[clock],
        verbose=2,
    )
    seconds = (time.perf_counter() - begins[1]) / (epochs - 1) if epochs > 1 else float("nan")
    return history.history, seconds


def main(epochs: int) -> dict[str, Any]:
    """Train, compare, print; return the printed figures, and the losses of epochs."""
    train, held_back = load()
    with IPUStrategy(num_ipus=2).scope():
        model = pipelined()
        model.print_pipeline_stage_assignment_summary()
        ours, seconds = fitted(model, BATCH, train, held_back, epochs)
        labels = model.predict(held_back[0], batch_size=BATCH, verbose=0).argmax(1)
    training = [program for program in ipu_dynamo.programs() if program.kind == "training"]
    print(training[-1].short())
    plain = compiled(network())
    theirs, plain_seconds = fitted(plain, BATCH * ACCUMULATION, train, held_back, epochs)
    expected = plain.predict(held_back[0], batch_size=BATCH, verbose=0).argmax(1)
    figures = {
        "accuracy": float((labels == held_back[1]).mean()),
        "agreement": float((labels == expected).mean()),
        "loss_difference": abs(ours["loss"][-1] / theirs["loss"][-1] - 1),
        "weight_difference": largest_difference(model, plain),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "losses": {"two IPUs": ours["loss"], "plain Keras": theirs["loss"]},
    }
    print(f"accuracy on {len(labels)} held-back digits: {figures['accuracy']:.2%}")
    print(f"predictions that plain Keras makes too:   {figures['agreement']:.2%}")
    print(f"loss of the last epoch differs by:        {figures['loss_difference']:.1e}")
    print(f"weights differ by:                        {figures['weight_difference']:.1e}")
    print(f"an epoch takes {seconds:.2f} s, in plain Keras {plain_seconds:.2f} s")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args().epochs)
