"""Check what an execution runs: each call once, after its inputs, by stage; and what it refuses."""

import keras
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.keras import extend
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.stages.stage_plan import stage_plan
from tests.keras.stages.keras_graphs import D, Subclass, branches, fill, nesting

pytestmark = pytest.mark.filterwarnings("ignore:`build:UserWarning")


def run(plan, x):
    """Compute a plan call by call with plain Keras, as an execution would."""
    if plan.inputs is None:
        for call in plan.invocations:
            x = call.operation(x)
        return x
    flat = keras.tree.flatten(x)
    inputs = keras.tree.flatten(plan.inputs)
    values = dict(zip(map(id, inputs), flat, strict=True))
    for call in plan.invocations:
        args, kwargs = call.node.arguments.fill_in(values)
        result = call.operation(*args, **kwargs) if call.nested is None else run(call.nested, *args)
        flat = keras.tree.flatten(result)
        values.update(zip(map(id, call.node.outputs), flat, strict=True))
    outputs = [values[id(tensor)] for tensor in keras.tree.flatten(plan.outputs)]
    return keras.tree.pack_sequence_as(plan.outputs, outputs)


@st.composite
def staged_models(draw):
    """A random Functional of layers, shared or not, operations and a nested model; with stages."""
    inputs = [keras.Input((3,)) for _ in range(draw(st.integers(1, 2)))]
    tensors = list(inputs)
    shared = D(3)
    inner = keras.Sequential([keras.Input((3,)), D(4), D(3)])
    for _ in range(draw(st.integers(1, 6))):
        pick = st.sampled_from(tensors)
        kind = draw(st.sampled_from(["dense", "shared", "add", "sum", "relu", "nested"]))
        match kind:
            case "dense":
                tensors.append(D(3)(draw(pick)))
            case "shared":
                tensors.append(shared(draw(pick)))
            case "add":
                tensors.append(keras.layers.Add()([draw(pick), draw(pick)]))
            case "sum":
                tensors.append(draw(pick) + draw(pick))
            case "relu":
                tensors.append(keras.ops.relu(draw(pick)))
            case "nested":
                tensors.append(inner(draw(pick)))
    outputs = [keras.layers.Identity()(draw(st.sampled_from(tensors))), D(1)(tensors[-1])]
    model = extend(keras.Model(inputs, outputs))
    assignment = model.get_pipeline_stage_assignment()
    stage = 0

    def walk(elements):  # in post order later calls get later stages, so that the flow is forward
        nonlocal stage
        for element in elements:
            if element.is_nested_model:
                walk(element.pipeline_stage_assignments)
            else:
                stage += draw(st.integers(0, 1)) if seen else 0
                seen.append(element)
                element.pipeline_stage = stage

    seen = []
    walk(assignment)
    model.set_pipeline_stage_assignment(assignment)
    return model, stage + 1


@given(case=staged_models())
def test_a_plan_computes_what_the_model_does(case):
    model, num_stages = case
    x = [torch.rand(2, 3) for _ in model.inputs]
    plan = stage_plan(model)
    assert plan.num_stages == num_stages
    stages = [call.stage for call in plan.invocations]
    assert stages == sorted(stages)
    for result, expected in zip(run(plan, x), model(x), strict=True):
        assert torch.equal(result, expected)


def test_a_plan_of_a_subclass_computes_what_it_does():
    model = extend(Subclass())
    model.build((None, 3))
    model.set_pipeline_stage_assignment([0, 0, 1, 1, 2])
    x = torch.rand(5, 3)
    plan = stage_plan(model, x)
    assert [(call.operation.name.split("_")[0], call.stage) for call in plan.invocations] == [
        ("shared", 0),
        ("shared", 0),
        ("inner", 1),
        ("add", 1),
        ("dropout", 1),
        ("last", 2),
    ]
    assert torch.equal(run(plan, x), model(x))


def test_training_has_a_trace_of_its_own():
    model = extend(Subclass())
    model.build((None, 3))
    model.set_pipeline_stage_assignment([0, 0, 1, 1, 2])
    for training in (True, False):
        plan = stage_plan(model, torch.rand(5, 3), training=training)
        (dropout,) = (call for call in plan.invocations if call.operation.name == "dropout")
        assert dropout.node.arguments.kwargs["training"] is training


def test_a_subclass_that_calls_other_layers_in_training_is_refused():
    class Other(Subclass):
        def call(self, x, training=None):
            return self.last(self.dropout(x) if training else x)

    model = extend(Other())
    model.build((None, 3))
    with pytest.raises(ValueError, match="calls other layers when training is True"):
        model.get_pipeline_stage_assignment()


class Stateful(keras.Model):
    """A subclass that does in `call` what a test hands it."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.a, self.b = D(3), D(1)
        self.w = self.add_weight(shape=(3, 3), name="w")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.b(self.between(self, self.a(x)))


def assigning(model, x):
    model.count.assign_add(1.0)
    return x


def replacing(model, x):
    model.count.assign(1.0)
    return x


@pytest.mark.parametrize(
    ("between", "variable"),
    [
        (assigning, "count"),
        (replacing, "count"),
        (lambda model, x: x @ (model.w * 2.0), "w"),
        (lambda model, x: x + keras.random.normal((3,), seed=model.seeds), "seed_generator_state"),
        (lambda model, x: x + keras.random.normal((3,)), "seed_generator_state"),
    ],
)
def test_a_call_that_uses_variables_by_itself_is_refused(between, variable):
    model = extend(Stateful(between))
    model.build((None, 3))
    with pytest.raises(ValueError, match=rf"reads or assigns variable \S*{variable} by itself"):
        model.set_pipeline_stage_assignment([0, 1])
    assert float(model.count) == 0.0


def test_an_operation_may_take_a_variable():
    model = extend(Stateful(lambda model, x: keras.ops.matmul(x, model.w)))
    model.build((None, 3))
    model.set_pipeline_stage_assignment([0, 1])
    x = torch.rand(2, 3)
    assert torch.equal(run(stage_plan(model, x), x), model(x))


def test_other_shapes_are_another_trace_and_another_graph_is_refused():
    class ByShape(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = D(3, name="a"), D(3, name="b")

        def call(self, x):
            x = keras.ops.reshape(x, (-1, x.shape[-1]))
            return self.a(x) if x.shape[0] == 7 else self.b(self.a(x))

    model = extend(ByShape())
    model.build((4, 3))
    model.set_pipeline_stage_assignment([0, 1])
    plan = stage_plan(model, torch.rand(4, 3))
    again = stage_plan(model, torch.rand(6, 3))
    assert plan.invocations[0].node is not again.invocations[0].node
    assert stage_plan(model, torch.rand(4, 3)).invocations[0].node is plan.invocations[0].node
    with pytest.raises(ValueError, match=r"no longer valid.*float32 \(7, 3\)"):
        stage_plan(model, torch.rand(7, 3))
    assert stage_plan(model, torch.rand(6, 3)).num_stages == 2


def test_inputs_that_are_no_floats():
    class Tokens(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = D(3), D(1)

        def call(self, x):
            return self.last(self.first(keras.ops.one_hot(x, 5)))

    model = extend(Tokens())
    model.build(keras.Input((4,), dtype="int32"))
    assert model.get_build_config()["input_shape"] == (None, 4)
    model.set_pipeline_stage_assignment([0, 1])
    x = torch.randint(5, (2, 4), dtype=torch.int32)
    assert torch.equal(run(stage_plan(model, x), x), model(x))


def test_a_subclass_of_several_inputs():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = D(3), D(3)

        def call(self, inputs):
            return {"sum": self.a(inputs["x"]) + self.b(inputs["y"])}

    model = extend(Two())
    model.build({"x": (None, 3), "y": (None, 2)})
    model.set_pipeline_stage_assignment([0, 1])
    x = {"x": torch.rand(4, 3), "y": torch.rand(4, 2)}
    assert torch.equal(run(stage_plan(model, x), x)["sum"], model(x)["sum"])


def test_calls_go_by_stage_before_post_order():
    inputs = keras.Input((3,))
    late, early = D(3, name="late")(inputs), D(3, name="early")(inputs)
    model = extend(keras.Model(inputs, keras.layers.Add(name="add")([late, early])))
    stages = {"late": 1, "early": 0, "add": 1}
    assignment = model.get_pipeline_stage_assignment()
    assert [element.layer.name for element in assignment] == ["late", "early", "add"]
    for element in assignment:
        element.pipeline_stage = stages[element.layer.name]
    model.set_pipeline_stage_assignment(assignment)
    plan = stage_plan(model)
    assert [call.operation.name for call in plan.invocations] == ["early", "late", "add"]
    x = torch.rand(2, 3)
    assert torch.equal(run(plan, x), model(x))


def test_a_build_for_a_trace_is_not_noted():
    model = extend(Subclass())
    with keras.StatelessScope():
        model.build((83, 3))
    assert state_of(model).input_specs is None


def test_masks_are_operations_of_the_graph():
    layers = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
    model = extend(keras.Sequential([keras.Input((4,), dtype="int32"), *layers, D(1)]))
    assert len(model.get_pipeline_stage_assignment()) == 3
    model.set_pipeline_stage_assignment([0, 1, 1])
    plan = stage_plan(model)
    assert [call.stage for call in plan.invocations] == [0, 0, 1, 1]
    assert "not_equal" in {call.operation.name.rstrip("_0123456789") for call in plan.invocations}
    x = torch.randint(5, (2, 4), dtype=torch.int32)
    assert torch.equal(run(plan, x), model(x))


def test_a_model_without_stages_has_no_plan():
    for model in (extend(branches()), extend(nesting("sequential")), extend(Subclass())):
        assert stage_plan(model, torch.rand(2, 3)) is None


def test_a_subclass_without_stages_is_not_traced():
    class Raw(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = D(1)

        def call(self, x):
            return self.last(torch.nn.functional.pad(x, (1, 0)))

    model = extend(Raw())
    assert stage_plan(model, torch.rand(2, 3)) is None
    assert state_of(model).trace is None


def test_a_method_that_stages_would_leave_out_is_refused():
    cls = type("Mine", (Subclass,), {"predict_step": lambda self, data: None})
    model = extend(cls())
    model.build((None, 3))
    model.set_pipeline_stage_assignment([0, 0, 1, 1, 2])
    with pytest.raises(RuntimeError, match=r"class Mine of model .* overrides predict_step"):
        stage_plan(model, torch.rand(2, 3))


def test_empty_stages_are_refused_with_the_list():
    model = extend(branches())
    model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), [0, 2, 2, 5]))
    with pytest.raises(
        RuntimeError, match=r"branches .* up to 5, and no layer is on stages \[1, 3, 4\]"
    ):
        stage_plan(model)


@pytest.mark.parametrize("change", ["add", "pop"])
def test_a_changed_sequential_is_refused(change):
    model = extend(keras.Sequential([keras.Input((3,)), D(3), D(3), D(1, name="third")]))
    model.set_pipeline_stage_assignment([0, 1, 1])
    if change == "add":
        model.add(D(1, name="fourth"))
    else:
        model.pop()
    words = "fourth was added" if change == "add" else "third was removed"
    with pytest.raises(ValueError, match=f"no longer valid: layer {words}"):
        stage_plan(model)


def test_programs_of_other_stages_are_dropped():
    model = extend(keras.Sequential([keras.Input((3,)), D(3), D(1)]))
    model.set_pipeline_stage_assignment([0, 0])
    stage_plan(model)
    state_of(model).programs["fit"] = program = object()
    stage_plan(model)
    assert state_of(model).programs == {"fit": program}
    model.get_pipeline_stage_assignment()[1].pipeline_stage = 1  # the element that was set
    assert stage_plan(model).num_stages == 2
    assert state_of(model).programs == {}
    model.get_pipeline_stage_assignment()[1].pipeline_stage = None
    with pytest.raises(ValueError, match="has not been assigned a pipeline stage"):
        stage_plan(model)


def test_a_sequential_without_a_graph_is_a_chain():
    class Sum(keras.layers.Layer):
        def call(self, inputs):
            return inputs["x"] + inputs["y"]

    model = extend(keras.Sequential([Sum(), D(1)]))
    x = {"x": torch.rand(2, 3), "y": torch.rand(2, 3)}
    expected = model(x)
    model.set_pipeline_stage_assignment([0, 1])
    plan = stage_plan(model)
    assert [call.node for call in plan.invocations] == [None, None]
    np.testing.assert_array_equal(run(plan, x).detach(), expected.detach())
