"""Check what PipelineStage assigns: by construction, by call, in every kind of model."""

import keras
import pytest

from ipu_dynamo.keras import IPUStrategy, PipelineStage
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.stages.stage_plan import stage_plan
from tests.keras.stages.keras_graphs import D

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")


@pytest.fixture
def _scope():
    with IPUStrategy(4).scope():
        yield


def stages(model):
    return [
        element.pipeline_stage
        if not element.is_nested_model
        else [inner.pipeline_stage for inner in element.pipeline_stage_assignments]
        for element in model.get_pipeline_stage_assignment()
    ]


@pytest.mark.parametrize("stage", [-1, 1.0, True, "0"])
def test_a_stage_is_an_integer_from_zero(stage):
    with pytest.raises(ValueError, match="a pipeline stage is an integer from 0 on"):
        PipelineStage(stage)


def test_outside_of_a_scope_it_is_refused():
    with pytest.raises(RuntimeError, match="outside of a strategy's scope"), PipelineStage(0):
        pass


@pytest.mark.usefixtures("_scope")
def test_one_in_another_is_refused():
    with PipelineStage(0):
        with (
            pytest.raises(RuntimeError, match=r"PipelineStage\(1\) stands inside PipelineStage\(0"),
            PipelineStage(1),
        ):
            pass
        assert vars(D(1))["_ipu_dynamo_stage"] == 0
    with PipelineStage(1):
        pass


@pytest.mark.usefixtures("_scope")
def test_construction_and_calls_and_a_call_wins():
    inputs = keras.Input((3,))
    with PipelineStage(0):
        first = D(3)
    x = first(inputs)
    x = first(x)
    with PipelineStage(1):
        x = first(x)
        last = D(1)
    model = keras.Model(inputs, last(x))
    assert stages(model) == [0, 0, 1, 1]
    assert [call.stage for call in stage_plan(model).invocations] == [0, 0, 1, 1]


@pytest.mark.usefixtures("_scope")
def test_a_functional_that_leaves_a_layer_out_is_refused():
    inputs = keras.Input((3,))
    with PipelineStage(0):
        x = D(3)(inputs)
    x = D(3, name="forgotten")(x)
    with pytest.raises(ValueError, match=r"layer forgotten of model .* has not been assigned"):
        keras.Model(inputs, x)


@pytest.mark.usefixtures("_scope")
def test_blocks_are_held_to_the_flow():
    inputs = keras.Input((3,))
    with PipelineStage(1):
        x = D(3)(inputs)
    with PipelineStage(0):
        x = D(3)(x)
    with pytest.raises(ValueError, match="has not yet been executed"):
        keras.Model(inputs, x)


@pytest.mark.usefixtures("_scope")
def test_operations_need_no_stage_even_in_a_block():
    inputs = keras.Input((3,))
    with PipelineStage(0):
        x = D(3)(inputs)
    with PipelineStage(1):
        x = keras.ops.relu(x)  # on stage 0 all the same: its input is there
    with PipelineStage(1):
        x = D(3)(x) + 1.0
    plan = stage_plan(keras.Model(inputs, x))
    assert [(call.operation.name.split("_")[0], call.stage) for call in plan.invocations] == [
        ("dense", 0),
        ("relu", 0),
        ("dense", 1),
        ("add", 1),
    ]


@pytest.mark.usefixtures("_scope")
def test_without_a_block_there_is_no_pipeline():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, D(1)(inputs))
    assert state_of(model).assignment is None
    assert stage_plan(model) is None


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("known", [True, False])
def test_a_sequential_by_construction(known):
    layers = [keras.Input((3,))] if known else []
    for stage in (0, 1):
        with PipelineStage(stage):
            layers += [D(3), D(3)]
    model = keras.Sequential(layers)
    if not known:
        assert stage_plan(model).num_stages == 2  # found when it is executed, at the latest
        model.build((None, 3))
    assert stages(model) == [0, 0, 1, 1]


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("known", [True, False])
def test_a_sequential_that_leaves_a_layer_out_is_refused(known):
    def make():
        with PipelineStage(0):
            layers = [D(3)]
        layers += [D(3, name="forgotten")]
        model = keras.Sequential([keras.Input((3,)), *layers] if known else layers)
        model.build((None, 3))

    with pytest.raises(ValueError, match=r"layer forgotten of model .* has not been assigned"):
        make()


@pytest.mark.usefixtures("_scope")
def test_adding_staged_layers_goes_on():
    model = keras.Sequential([keras.Input((3,))])
    for stage in (0, 1, 1):
        with PipelineStage(stage):
            model.add(D(3))
    assert stages(model) == [0, 1, 1]
    assert stage_plan(model).num_stages == 2


@pytest.mark.usefixtures("_scope")
def test_what_is_set_afterwards_counts():
    model = keras.Sequential([keras.Input((3,))])
    for stage in (0, 1):
        with PipelineStage(stage):
            model.add(D(3))
    model.set_pipeline_stage_assignment([0, 0])
    assert stage_plan(model).num_stages == 1
    assert stages(model) == [0, 0]


@pytest.mark.usefixtures("_scope")
def test_a_nested_model_has_its_own_stages():
    with PipelineStage(0):
        first = D(3)
    with PipelineStage(1):
        a = D(4)
    with PipelineStage(2):
        b, last = D(3), D(1)
    inner_inputs = keras.Input((3,))
    inner = keras.Model(inner_inputs, b(a(inner_inputs)))
    inputs = keras.Input((3,))
    model = keras.Model(inputs, last(inner(first(inputs))))
    assert stages(model) == [0, [1, 2], 2]
    with pytest.raises(ValueError, match="layer plain of model"):
        keras.Model(inputs, D(1, name="plain")(inner(first(inputs))))
    unstaged = keras.Sequential([D(3)], name="unstaged")
    with pytest.raises(ValueError, match="layer unstaged of model"):
        keras.Model(inputs, last(unstaged(first(inputs))))


@pytest.mark.usefixtures("_scope")
def test_a_functional_of_inner_tensors_keeps_the_stages_of_calls():
    inputs = keras.Input((3,))
    layers = [D(3), D(3), D(3)]
    x = layers[0](inputs)
    with PipelineStage(0):
        y = layers[1](x)
    with PipelineStage(1):
        z = layers[2](y)
    assert stages(keras.Model(x, z)) == [0, 1]


class ByConstruction(keras.Model):
    def __init__(self, complete=True):
        super().__init__()
        with PipelineStage(0):
            self.a = D(3)
        if complete:
            with PipelineStage(1):
                self.b = D(1)
        else:
            self.b = D(1, name="forgotten")

    def call(self, x):
        return self.b(self.a(x) * 2.0)


class ByCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = D(3), D(1)

    def call(self, x):
        with PipelineStage(0):
            x = self.a(x)
        with PipelineStage(1):
            return self.b(x)


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("cls", [ByConstruction, ByCall])
def test_a_subclass_is_traced_by_its_build(cls):
    model = cls()
    model.build((None, 3))
    assert state_of(model).trace is not None
    assert stages(model) == [0, 1]


@pytest.mark.usefixtures("_scope")
@pytest.mark.parametrize("cls", [ByConstruction, ByCall])
def test_a_subclass_is_traced_by_its_first_execution(cls):
    model = cls()
    plan = stage_plan(model, keras.ops.ones((4, 3)))
    assert plan.num_stages == 2
    assert stages(model) == [0, 1]


@pytest.mark.usefixtures("_scope")
def test_a_subclass_that_leaves_a_layer_out_is_refused():
    with pytest.raises(ValueError, match=r"layer forgotten .* has not been assigned"):
        ByConstruction(complete=False).build((None, 3))
    with pytest.raises(ValueError, match=r"layer forgotten .* has not been assigned"):
        stage_plan(ByConstruction(complete=False), keras.ops.ones((4, 3)))


@pytest.mark.usefixtures("_scope")
def test_a_call_that_fails_in_a_block_says_so():
    class Failing(keras.Model):
        def call(self, x):
            with PipelineStage(0):
                raise LookupError("in call")

    with pytest.raises(LookupError, match="in call"):
        Failing().build((None, 3))
    with PipelineStage(0):  # none is left open
        pass
