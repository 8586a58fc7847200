"""Check what an assignment consists of, and what setting one accepts and refuses."""

import logging
import re

import keras
import pytest

from ipu_dynamo.keras import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
    extend,
)
from ipu_dynamo.keras.attach.model_state import state_of
from tests.keras.stages.keras_graphs import D, Subclass, branches, fill, names, nesting


def built_subclass():
    model = extend(Subclass())
    model.build((None, 3))
    return model


def stages_of(model):
    return [element.pipeline_stage for element in model.get_pipeline_stage_assignment()]


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
class TestOrder:
    def test_a_functional_in_post_order(self):
        assignment = extend(branches()).get_pipeline_stage_assignment()
        assert names(assignment) == [("shared", 0), ("shared", 1), ("right", 0), ("last", 0)]
        assert {type(element) for element in assignment} == {FunctionalLayerPipelineStageAssignment}
        assert all(element.pipeline_stage is None for element in assignment)

    def test_operations_are_looked_through(self):
        inbound = [
            [layer.name for layer in element.inbound_layers]
            for element in extend(branches()).get_pipeline_stage_assignment()
        ]
        assert inbound == [["x"], ["shared"], ["shared"], ["shared", "right"]]

    def test_a_layer_that_gives_several_inputs_is_inbound_once(self):
        inputs = keras.Input((3,), name="x")
        x = D(3, name="first")(inputs)
        model = extend(keras.Model(inputs, keras.layers.Add()([x + x, x])))
        inbound = model.get_pipeline_stage_assignment()[1].inbound_layers
        assert [layer.name for layer in inbound] == ["first"]

    def test_the_node_index_counts_calls_in_any_graph(self):
        layer = D(3, name="shared")
        layer(keras.Input((3,)))
        inputs = keras.Input((3,))
        model = extend(keras.Model(inputs, layer(inputs)))
        assert names(model.get_pipeline_stage_assignment()) == [("shared", 1)]

    def test_nested_models(self):
        assignment = extend(nesting()).get_pipeline_stage_assignment()
        inner = [("a", 0), ("b", 0)]
        assert names(assignment) == [
            ("first", 0),
            ("inner", assignment[1].node_index, inner),
            ("inner", assignment[2].node_index, inner),
            ("last", 0),
        ]
        assert assignment[2].node_index == assignment[1].node_index + 1
        assert isinstance(assignment[1], FunctionalNestedModelPipelineStageAssignment)
        element = assignment[1].pipeline_stage_assignments[0]
        assert isinstance(element, SequentialLayerPipelineStageAssignment)
        element.pipeline_stage = 7  # calls of one model have elements of their own
        assert assignment[2].pipeline_stage_assignments[0].pipeline_stage is None

    def test_a_sequential_and_what_is_in_it(self):
        assignment = extend(nesting("sequential")).get_pipeline_stage_assignment()
        assert names(assignment) == [
            ("first", 0),
            ("inner", 0, [("a", 0), ("b", 0)]),
            ("last", 0),
        ]
        assert isinstance(assignment[1], SequentialNestedModelPipelineStageAssignment)

    def test_a_subclass_in_the_order_of_its_trace(self):
        model = built_subclass()
        expected = [
            ("shared", 0),
            ("shared", 1),
            ("inner", 0, [("a", 0)]),
            ("dropout", 0),
            ("last", 0),
        ]
        assignment = model.get_pipeline_stage_assignment()
        assert names(assignment) == expected
        assert isinstance(assignment[0], ModelLayerPipelineStageAssignment)
        assert isinstance(assignment[2], NestedModelPipelineStageAssignment)
        assert [layer.name for layer in assignment[3].inbound_layers] == ["inner"]
        model.shared(keras.Input((3,)))  # a call elsewhere shifts nothing
        state_of(model).trace = None
        assert names(model.get_pipeline_stage_assignment()) == expected

    def test_a_nested_model_brings_its_own_assignment(self):
        model = extend(nesting())
        model.get_layer("inner").set_pipeline_stage_assignment([0, 1])
        element = model.get_pipeline_stage_assignment()[1]
        assert [each.pipeline_stage for each in element.pipeline_stage_assignments] == [0, 1]
        element.pipeline_stage_assignments[0].pipeline_stage = 7
        first, other = model.get_layer("inner"), model.get_pipeline_stage_assignment()[2]
        assert first.get_pipeline_stage_assignment()[0].pipeline_stage == 0
        assert other.pipeline_stage_assignments[0].pipeline_stage == 0

    def test_calls_are_counted_in_their_own_order_and_not_in_post_order(self):
        class Branches(keras.Model):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.last = D(3, name="a"), D(3, name="b"), D(1, name="last")

            def call(self, x):
                return [self.last(self.a(x)), self.last(self.b(x))]

        model = extend(Branches())
        model.build((None, 3))
        calls = [
            (element.node_index, element.inbound_layers[0].name)
            for element in model.get_pipeline_stage_assignment()
            if element.layer is model.last
        ]
        assert calls == [(1, "b"), (0, "a")]

    def test_text_names_layer_index_and_stage(self):
        element = FunctionalLayerPipelineStageAssignment(D(1, name="d"), 2, pipeline_stage=3)
        assert all(part in str(element) for part in ("d", "2", "3"))
        nested = NestedModelPipelineStageAssignment(nesting("sequential"), 1, [element])
        assert str(element) in str(nested)
        assert nested.nested_model.name in str(nested)


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
class TestSetting:
    def test_what_was_set_is_given_back_as_a_copy(self):
        model = extend(branches())
        assignment = fill(model.get_pipeline_stage_assignment(), [0, 0, 1, 1])
        model.set_pipeline_stage_assignment(assignment)
        copy = model.get_pipeline_stage_assignment()
        assert copy == assignment
        assert copy is not model.get_pipeline_stage_assignment()
        copy.clear()
        assert stages_of(model) == [0, 0, 1, 1]
        model.reset_pipeline_stage_assignment()
        assert stages_of(model) == [None] * 4

    @pytest.mark.parametrize("built", [True, False])
    def test_a_sequential_takes_integers(self, built):
        layers = [D(3), D(3), D(1)]
        model = extend(keras.Sequential([keras.Input((3,)), *layers] if built else layers))
        model.set_pipeline_stage_assignment([0, 0, 1])
        assert stages_of(model) == [0, 0, 1]
        if not built:
            model.build((None, 3))
            assert stages_of(model) == [0, 0, 1]

    def test_a_subclass_takes_integers(self):
        model = built_subclass()
        model.set_pipeline_stage_assignment([0, 1, 1, 2, 2])
        inner = model.get_pipeline_stage_assignment()[2]
        assert [element.pipeline_stage for element in inner.pipeline_stage_assignments] == [1]

    def test_elements_made_by_hand(self):
        model = extend(branches())
        layers = {layer.name: layer for layer in model.layers}
        calls = [("shared", 0), ("shared", 1), ("right", 0), ("last", 0)]
        make = FunctionalLayerPipelineStageAssignment
        model.set_pipeline_stage_assignment([make(layers[name], i, 0) for name, i in calls])
        assert stages_of(model) == [0] * 4

    def test_an_unbuilt_subclass_is_refused(self):
        model = extend(Subclass())
        for refused in (
            model.get_pipeline_stage_assignment,
            model.print_pipeline_stage_assignment_summary,
            lambda: model.set_pipeline_stage_assignment([0]),
            lambda: ModelLayerPipelineStageAssignment(model.last, 0).inbound_layers,
        ):
            with pytest.raises(RuntimeError, match="has not been built yet"):
                refused()


def elements(model):
    return fill(model.get_pipeline_stage_assignment(), [0] * 20)


def changed(stages):
    return lambda model: fill(model.get_pipeline_stage_assignment(), stages)


def swapped(model):
    assignment = elements(model)
    assignment[0], assignment[1] = assignment[1], assignment[0]
    return assignment


def with_element(position, make):
    def change(model):
        assignment = elements(model)
        assignment[position] = make(model, assignment[position])
        return assignment

    return change


def relabelled(cls):
    return lambda model, element: cls(element.layer, element.node_index, 0)


FUNCTIONAL = [
    ("a tuple", lambda model: tuple(elements(model)), "needs to be a list.*tuple"),
    ("too short", lambda model: elements(model)[1:], "3, does not match the number of layers in "
     r"the graph .*, 4 \(input layers are excluded"),
    ("integers", lambda model: [0, 0, 1, 1], "must be an instance of FunctionalLayer"),
    ("another class", with_element(1, relabelled(ModelLayerPipelineStageAssignment)),
     "must be an instance of FunctionalLayer"),
    ("swapped calls", swapped, r"does not match the post-order.*shared \(node index 1.*shared "
     r"\(node index 0"),
    ("another layer", with_element(2, lambda model, element: FunctionalLayerPipelineStageAssignment(
        model.get_layer("last"), 0, 0)), r"does not match the post-order.*last .*right "),
    ("no stage", changed([0, 0, None, 1]), r"right \(node index 0\) has not been assigned a "
     "pipeline stage"),
    ("negative", changed([0, 0, -1, 1]), "layer right: the pipeline stage is -1"),
    ("no integer", changed([0, 0, 1.0, 1]), "layer right: the pipeline stage is 1.0"),
    ("a bool", changed([0, 0, True, 1]), "layer right: the pipeline stage is True"),
    ("against the data flow", changed([0, 1, 0, 1]), r"right \(node index 0\) on pipeline stage 0 "
     "has a dependency from a pipeline stage which has not yet been executed.*stage 1"),
    ("against the flow through an operation", changed([0, 0, 2, 1]), "layer last.*which has not "
     "yet been executed.*stage 2"),
]  # fmt: skip

SUBCLASS = [
    ("another index", with_element(1, lambda model, element: ModelLayerPipelineStageAssignment(
        element.layer, 0, 0)), r"does not match the post-order.*node index 0 of 2 calls"),
    ("an index beyond", with_element(1, lambda model, element: ModelLayerPipelineStageAssignment(
        element.layer, 2, 0)), r"does not match the post-order.*node index 2 of 2 calls"),
    ("a layer element for a model", with_element(2, relabelled(ModelLayerPipelineStageAssignment)),
     "inner, must be an instance of NestedModelPipelineStageAssignment"),
    ("too short inside", with_element(2, lambda model, element: NestedModelPipelineStageAssignment(
        element.layer, 0, [])), "0, does not match the number of layers.*model inner, 1"),
    ("no list inside", with_element(2, lambda model, element: type(
        "Odd", (NestedModelPipelineStageAssignment,), {"pipeline_stage_assignments": ()})(
            element.layer, 0, [])), "model inner needs to be a list"),
    ("against the flow inside", changed([0, 1, 0, 1, 1]), r"layer a .*which has not yet been"),
    ("against the flow out of a model", changed([0, 0, 2, 1, 1]), r"layer dropout .*stage 2"),
]  # fmt: skip

SEQUENTIAL = [
    ("no list", lambda model: (0, 0, 1), "needs to be a list"),
    ("too long", lambda model: [0, 0, 1, 1], "4, does not match the number of layers.*, 3"),
    ("mixed", lambda model: [0, *elements(model)[1:]], "All elements of"),
    ("others", lambda model: ["0", "0", "1"], "All elements of"),
    ("swapped", swapped, "layer second at index 0, where model .* has layer first"),
    ("no stage", changed([0, None, 1]), "second .*has not been assigned a pipeline stage"),
    ("negative", lambda model: [0, -1, 0], "layer second: the pipeline stage is -1"),
    ("not from 0 on", lambda model: [1, 1, 1], "The first layer of model .*, first, .*stage 1"),
    ("a stage left out", lambda model: [0, 0, 2], "third is on stage 2: after stage 0 .*stage 1"),
    ("back", lambda model: [0, 1, 0], "third is on stage 0: after stage 1 "),
]  # fmt: skip


def three():
    layers = [D(3, name=name) for name in ("first", "second", "third")]
    return extend(keras.Sequential([keras.Input((3,)), *layers], name="three"))


CASES = [
    *(("functional", lambda: extend(branches()), [0, 0, 1, 1], *case) for case in FUNCTIONAL),
    *(("subclass", built_subclass, [0, 0, 1, 1, 1], *case) for case in SUBCLASS),
    *(("sequential", three, [0, 1, 1], *case) for case in SEQUENTIAL),
]


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
@pytest.mark.parametrize(
    ("make", "valid", "change", "words"),
    [(make, valid, change, words) for _, make, valid, _, change, words in CASES],
    ids=[f"{kind}: {name}" for kind, _, _, name, _, _ in CASES],
)
def test_a_wrong_assignment_is_refused_and_the_one_before_stays(make, valid, change, words):
    model = make()
    before = fill(model.get_pipeline_stage_assignment(), valid)
    wrong = change(model)
    model.set_pipeline_stage_assignment(before)
    state_of(model).programs["fit"] = program = object()
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        model.set_pipeline_stage_assignment(wrong)
    assert model.get_pipeline_stage_assignment() == before
    assert state_of(model).programs == {"fit": program}


def test_a_sequential_with_a_model_inside_is_checked_by_flow():
    model = extend(nesting("sequential"))
    assignment = fill(model.get_pipeline_stage_assignment(), [0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"layer b .*which has not yet been executed"):
        model.set_pipeline_stage_assignment(assignment)
    model.set_pipeline_stage_assignment(fill(assignment, [0, 0, 2, 2]))
    model.set_pipeline_stage_assignment([0, 1, 2])
    assert [e.pipeline_stage for e in model.get_pipeline_stage_assignment()[::2]] == [0, 2]


def test_the_flow_goes_through_masks_into_models():
    inner = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2, name="lstm")])
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
    model = extend(keras.Model(inputs, inner(x)))
    with pytest.raises(ValueError, match=r"layer lstm .*which has not yet been executed"):
        model.set_pipeline_stage_assignment(fill(model.get_pipeline_stage_assignment(), [1, 0]))


@pytest.mark.parametrize("change", ["add", "pop"])
def test_a_changed_sequential_keeps_its_old_list(change, caplog):
    model = three()
    model.set_pipeline_stage_assignment([0, 1, 1])
    before = model.get_pipeline_stage_assignment()
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        if change == "add":
            model.add(D(1, name="fourth"))
        else:
            model.pop()
        assert model.get_pipeline_stage_assignment() == before
    name = "fourth" if change == "add" else "third"
    assert [name in record.getMessage() for record in caplog.records] == [True, True]
    model.set_pipeline_stage_assignment([0, 1, 1, 1] if change == "add" else [0, 1])
    caplog.clear()
    model.get_pipeline_stage_assignment()
    assert not caplog.records
