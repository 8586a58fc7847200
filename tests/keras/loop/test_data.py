"""Check what sources of data are taken, and what is refused of them."""

import keras
import numpy as np
import pytest
import torch

from ipu_dynamo.keras.attach.model_state import state_of
from tests.keras.loop.cases import Recorder, arrays, outside_scopes, small_model

BATCHES, ROWS = 12, 4


class Batches(keras.utils.PyDataset):
    """Batches of arrays by number, which write down when epochs begin and end."""

    def __init__(self, batches=BATCHES, *, known=True, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = arrays(batches * ROWS)
        self.known, self.hooks = known, []

    @property
    def num_batches(self):
        return len(self.x) // ROWS if self.known else None

    def __getitem__(self, index):
        index %= len(self.x) // ROWS
        rows = slice(index * ROWS, (index + 1) * ROWS)
        return self.x[rows], self.y[rows]

    def on_epoch_begin(self):
        self.hooks.append("begin")

    def on_epoch_end(self):
        self.hooks.append("end")


def in_one_array(batches):
    """A generator that gives every batch out in the same memory."""
    x, y = (torch.from_numpy(array) for array in arrays(batches * ROWS))
    buffer = torch.zeros(ROWS, 3)
    for index in range(batches):
        rows = slice(index * ROWS, (index + 1) * ROWS)
        buffer[:] = x[rows]
        yield buffer, y[rows]


def loader(**kwargs):
    x, y = (torch.from_numpy(array) for array in arrays(BATCHES * ROWS))
    dataset = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(dataset, batch_size=ROWS, **kwargs)


def as_arrays():
    x, y = arrays(BATCHES * ROWS)
    return {"x": x, "y": y, "batch_size": ROWS}


def as_tensors():
    x, y = arrays(BATCHES * ROWS)
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(y), "batch_size": ROWS}


def with_weights():
    return {**as_arrays(), "sample_weight": np.linspace(0, 1, BATCHES * ROWS)}


SOURCES = {
    "arrays": as_arrays,
    "tensors": as_tensors,
    "weights": with_weights,
    "dataset": lambda: {"x": Batches()},
    "dataset with workers": lambda: {"x": Batches(workers=2)},
    "endless dataset": lambda: {"x": Batches(known=False), "steps_per_epoch": BATCHES},
    "loader": lambda: {"x": loader()},
    "shuffling loader": lambda: {"x": loader(shuffle=True)},
    "generator": lambda: {"x": in_one_array(2 * BATCHES), "steps_per_epoch": BATCHES},
}


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("source", "shuffle", "depth"),
    [
        *((source, False, 1) for source in SOURCES),
        ("arrays", True, 1),
        ("arrays", "batch", 4),
        ("dataset", True, 4),
        ("generator", False, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:`shuffle=True`")
def test_every_source_trains_as_in_plain_keras(machine, source, shuffle, depth):
    model, first = small_model(3), {**as_arrays(), "shuffle": False, "verbose": 0}
    model.fit(**first)  # builds metrics; for that Keras reads data, of which workers read more
    state_of(model).change(infeed_keywords={"prefetch_depth": depth})
    keras.utils.set_random_seed(7)  # of the shuffled order
    ours = model.fit(**SOURCES[source](), epochs=2, shuffle=shuffle, verbose=0).history
    with outside_scopes():
        plain = small_model()
        plain.fit(**first)
        keras.utils.set_random_seed(7)
        theirs = plain.fit(**SOURCES[source](), epochs=2, shuffle=shuffle, verbose=0).history
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-6)


def test_hooks_of_a_dataset_come_as_in_plain_keras_and_in_the_same_thread(machine):
    ours, theirs = Batches(), Batches()
    small_model(3).fit(ours, epochs=2, validation_data=Batches(), verbose=0)
    with outside_scopes():
        small_model().fit(theirs, epochs=2, validation_data=Batches(), verbose=0)
    assert ours.hooks == theirs.hooks


def test_steps_go_on_in_the_data_as_in_plain_keras(machine):
    x, y = arrays(100)
    recorder, plain = Recorder(), Recorder()
    with pytest.warns(UserWarning, match="ran out of data") as warned:
        small_model(20).fit(
            x, y, 1, epochs=4, steps_per_epoch=60, callbacks=[recorder], verbose=0, shuffle=False
        )
    assert sum("ran out" in str(w.message) for w in warned) == 2
    with outside_scopes(), pytest.warns(UserWarning, match="ran out of data"):
        small_model().fit(
            x, y, 1, epochs=4, steps_per_epoch=60, callbacks=[plain], verbose=0, shuffle=False
        )
    begins = recorder.numbers("on_train_batch_begin")
    assert begins == [0, 20, 40, 0, 20] * 2
    for ours, theirs in zip(recorder.logs("on_epoch_end"), plain.logs("on_epoch_end"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def test_a_generator_that_ends_between_executions_ends_the_epoch(machine):
    recorder, model = Recorder(), small_model(3)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(in_one_array(6), steps_per_epoch=12, callbacks=[recorder], verbose=0)
    assert recorder.numbers("on_train_batch_end") == [2, 5]


@pytest.mark.parametrize(("replicas", "steps"), [(1, 4), (2, 2)])
def test_data_that_ends_within_an_execution_is_refused(machine, replicas, steps):
    machine.replicas = replicas
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"ended after 6 batches .* takes 4 batches"):
        small_model(steps).fit(in_one_array(6), steps_per_epoch=12, callbacks=[recorder], verbose=0)
    assert len(recorder.numbers("on_train_batch_end")) == 1  # the whole execution before it


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_partial_batch_of_arrays_is_refused_before_any_step(machine, method):
    x, y = arrays(22)
    problem = r"22 rows in batches of 4 leave a partial batch of 2 over.* as 1, 2 or 11, pad"
    with pytest.raises(ValueError, match=problem):
        getattr(small_model(2), method)(
            **{"x": x} | ({} if method == "predict" else {"y": y}), batch_size=4, verbose=0
        )
    assert not machine.shapes


def test_a_partial_batch_is_refused_with_the_rows_of_its_split(machine):
    x, y = arrays(100)
    with pytest.raises(ValueError, match=r"80 rows in batches of 32 leave a partial batch of 16"):
        small_model(3).fit(x, y, batch_size=32, validation_split=0.2, verbose=0)


@pytest.mark.parametrize("sizes", [(4, 3, 4), (4, 3, 3), (3, 4)])
def test_only_the_last_batch_of_the_data_may_be_smaller(machine, sizes):
    def source():
        for size in sizes:
            yield arrays(size)

    number = sizes.index(3) if sizes[0] == 4 else 1
    with pytest.raises(ValueError, match=f"batch {number} (is a partial batch|has the shape)"):
        small_model().fit(source(), steps_per_epoch=len(sizes), verbose=0)


def test_a_partial_batch_that_comes_late_is_refused_with_its_number(machine):
    def source():
        yield from in_one_array(4)
        x, y = arrays(3)
        yield x, y

    with pytest.raises(ValueError, match=r"batch 4 is a partial batch: it has 3 rows.* have 4"):
        small_model(2).fit(source(), steps_per_epoch=6, verbose=0)
    assert len(machine.shapes) == 2


def test_a_partial_batch_that_is_left_out_is_none(machine):
    machine.replicas = 2
    x, _ = arrays(18)
    with pytest.warns(UserWarning, match="remaining 1 are left out"):
        assert small_model().predict(x, batch_size=4, verbose=0).shape == (16, 2)


def test_a_partial_batch_that_is_the_only_one_is_predicted(machine):
    x, _ = arrays(5)
    with pytest.warns(UserWarning, match="1 step: 1 is used"):
        assert small_model(4).predict(x, verbose=0).shape == (5, 2)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (lambda x, y: (x[:, :2], y), r"x of batch 1 has the shape \(4, 2\), .* \(4, 3\)"),
        (lambda x, y: (x.astype("int64"), y), "x of batch 1 has the type torch.int64"),
        (lambda x, y: (x, y, y[:, 0]), "batch 1 consists of x, y, sample_weight, .* of x, y:"),
        (lambda x, y: (x, {"a": y}), r"batch 1 consists of x, y\['a'\], .* of x, y:"),
        (lambda x, y: (np.concatenate([x, x]), y), r"x of batch 1 has the shape \(8, 3\)"),
    ],
)
def test_batches_of_another_form_are_refused(machine, second, problem):
    x, y = arrays(4)

    def source():
        yield x, y
        yield second(x, y)

    with pytest.raises(ValueError, match=problem):
        small_model(2).fit(source(), steps_per_epoch=2, verbose=0)
    assert not machine.shapes


def test_a_source_without_a_size_asks_for_steps(machine):
    for source in (in_one_array(4), Batches(known=False)):
        with pytest.raises(ValueError, match="you must specify the number of steps"):
            small_model().fit(source, verbose=0)
    x, y = arrays(4)
    with pytest.raises(ValueError, match="validation_steps"):
        small_model().fit(x, y, validation_data=in_one_array(4), verbose=0)
    assert not machine.shapes


def test_doubles_become_float32(machine):
    def source():
        for x, y in in_one_array(4):
            yield x.double(), y.numpy().astype("float64")

    small_model(2).fit(source(), steps_per_epoch=4, verbose=0)
    assert {leaf.dtype for x, y, _ in machine.first_batches for leaf in (x, y)} == {torch.float32}


def test_the_numbers_that_users_limit_for_debugging_act(machine):
    x, y = arrays(48)
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(4)
    try:
        recorder = Recorder()
        with pytest.warns(UserWarning, match="Limiting"):
            history = small_model(2).fit(
                x, y, batch_size=4, epochs=5, callbacks=[recorder], verbose=0
            )
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert history.epoch == [0, 1]
    assert recorder.numbers("on_train_batch_end") == [1, 3] * 2


def test_validation_splits_arrays(machine):
    x, y = arrays(40)
    model = small_model(2)
    keras.utils.set_random_seed(7)
    ours = model.fit(x, y, batch_size=4, validation_split=0.2, verbose=0).history
    with outside_scopes():
        plain = small_model()
        keras.utils.set_random_seed(7)
        theirs = plain.fit(x, y, batch_size=4, validation_split=0.2, verbose=0).history
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)
