"""Check which models become extended, and that Keras takes them for what they were."""

import copy
import pickle

import keras
import pytest

from ipu_dynamo.keras import IPUStrategy, extend
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.extensions import (
    Extension,
    FunctionalExtension,
    ModelExtension,
    SequentialExtension,
    plain_class,
)

EXTENSIONS = (FunctionalExtension, ModelExtension, SequentialExtension)


class Subclass(keras.Model):
    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class OfInputs(keras.Model):
    """A class that becomes a Functional where it is called with inputs and outputs."""


class OfItsOwn(keras.Model):
    """A class whose constructor makes it a Functional."""

    def __init__(self, units=2):
        inputs = keras.Input((3,))
        super().__init__(inputs, keras.layers.Dense(units)(inputs))


class Chain(keras.Sequential):
    pass


def functional(cls=keras.Model):
    inputs = keras.Input((3,))
    return cls(inputs, keras.layers.Dense(2)(inputs))


CASES = {
    "functional": (functional, FunctionalExtension, keras.Model),
    "user's functional": (lambda: functional(OfInputs), FunctionalExtension, OfInputs),
    "functional by its constructor": (OfItsOwn, FunctionalExtension, OfItsOwn),
    "sequential": (
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
        SequentialExtension,
        keras.Sequential,
    ),
    "user's sequential": (
        lambda: Chain([keras.Input((3,)), keras.layers.Dense(2)]),
        SequentialExtension,
        Chain,
    ),
    "subclass": (Subclass, ModelExtension, Subclass),
    "plain model": (keras.Model, ModelExtension, keras.Model),
}


@pytest.fixture
def _scope():
    with IPUStrategy().scope():
        yield


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("name", CASES)
def test_a_model_has_one_extension_and_its_name(name):
    make, extension, cls = CASES[name]
    models = [make(), make()]  # the second finds a class that Keras has changed
    for model in models:
        assert [kind for kind in EXTENSIONS if isinstance(model, kind)] == [extension]
        assert isinstance(model, cls)
    assert type(models[0]) is type(models[1])
    plain = plain_class(type(models[0]))
    assert type(models[0]).__name__ == plain.__name__
    assert type(models[0]).__module__ == plain.__module__


@pytest.mark.parametrize("name", CASES)
def test_extend_changes_an_existing_model_in_place(name):
    make, extension, _ = CASES[name]
    model = make()
    assert not isinstance(model, EXTENSIONS)
    assert extend(model) is model
    assert isinstance(model, extension)
    assert extend(model) is model
    model.set_infeed_queue_options(prefetch_depth=2)


def test_extend_reaches_models_inside():
    inner = functional()
    inputs = keras.Input((3,))
    outer = extend(keras.Model(inputs, keras.layers.Dense(1)(inner(inputs))))
    assert isinstance(inner, FunctionalExtension)
    assert isinstance(outer, FunctionalExtension)
    with pytest.raises(TypeError, match="only a Keras model"):
        extend(keras.layers.Dense(1))


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("name", CASES)
def test_the_configuration_is_that_of_plain_keras(name):
    make, _, _ = CASES[name]
    model = make()
    config = model.get_config()
    ours = config.pop("ipu", None)
    in_config = isinstance(model, FunctionalExtension | SequentialExtension)
    assert (ours is not None) == (in_config and not isinstance(model, OfItsOwn))
    assert config == super(Extension, model).get_config()


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
@pytest.mark.usefixtures("_scope")
def test_clones_are_extended_with_default_options():
    for make in (functional, CASES["sequential"][0], Subclass):
        model = make()
        model.build((None, 3))
        model.set_infeed_queue_options(prefetch_depth=3)
        clone = keras.models.clone_model(model)
        assert isinstance(clone, EXTENSIONS)
        assert state_of(clone).settings.infeed_keywords == {}


@pytest.mark.usefixtures("_scope")
def test_copies_keep_weights_and_options():
    model = functional()
    model.set_infeed_queue_options(prefetch_depth=3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, FunctionalExtension)
        assert state_of(other).settings.infeed_keywords == {"prefetch_depth": 3}
        for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
            assert (mine == theirs).all()


def test_a_registered_class_keeps_its_name_in_files():
    registered = keras.saving.register_keras_serializable("tests")(
        type("Registered", (Subclass,), {})
    )
    with IPUStrategy().scope():
        model = registered()
    assert keras.saving.serialize_keras_object(model)["registered_name"] == "tests>Registered"


@pytest.mark.usefixtures("_scope")
def test_a_state_belongs_to_one_model():
    one, other = functional(), functional()
    one.set_asynchronous_callbacks(True)
    assert not state_of(other).settings.asynchronous_callbacks
