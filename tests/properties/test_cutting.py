"""Check that the parts of a graph, and the program made of them, compute what the graph does."""

from itertools import pairwise

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo.capture.capture import (
    BACKWARD,
    STAGE,
    Joint,
    OutputRole,
    Placeholder,
    Report,
)
from ipu_dynamo.ops.graph_queries import root
from ipu_dynamo.options import Options
from ipu_dynamo.passes.joint.assign_gradient_stages import AssignGradientStages, stage_of_slot
from ipu_dynamo.passes.joint.partition import Partition
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.program.split_weight_gradients import SplitWeightGradients
from ipu_dynamo.testing import assert_close, assert_same_bits, aten_graphs, recipes
from ipu_dynamo.testing.recipe import Recipe, Step
from tests.properties.evaluate import (
    captured,
    check,
    evaluate,
    evaluate_parts,
    lines_of,
    named_inputs,
)
from tests.properties.running import draw_placement

KINDS = ["input", "buffer", "parameter", "constant"]


@st.composite
def placed_graphs(draw, *, partly=False):
    """A random graph as a capture whose operators have stages, and its inputs by name.

    Names of placeholders are also names of operators. Any value of the right shape becomes the
    gradient of a parameter or the new value of a buffer or input.

    Args:
        partly: leave stages out, as autograd does, and let some contradict the data.
    """
    graph, inputs = draw(aten_graphs())
    nodes = list(graph.graph.nodes)
    holders = [n for n in nodes if n.op == "placeholder"]
    operators = [n for n in nodes if n.op == "call_function"]
    pool = [n.name for n in operators] + [f"w{i}" for i in range(len(holders))]
    names = draw(st.permutations(pool))[: len(holders)]
    kinds = [draw(st.sampled_from(KINDS)) for _ in holders]
    roles = [Placeholder(n, k, k == "parameter") for n, k in zip(names, kinds, strict=True)]
    ipus = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    slot = 0
    for node in operators:
        if partly:
            stage = draw(st.none() | st.integers(0, len(ipus) - 1))
            if stage is not None:
                node.meta[STAGE] = stage
            slot = max(slot, int(draw(st.booleans())))
            node.meta[BACKWARD] = slot > 0
        else:
            slot = draw(st.integers(slot, 2 * (len(ipus) - 1)))
            stage, late = stage_of_slot(slot, len(ipus)), slot >= len(ipus)
            node.meta |= {STAGE: stage, BACKWARD: late}
    returned = list(nodes[-1].args[0])
    outputs = [OutputRole("value", str(i)) for i in range(len(returned))]
    for holder, role in zip(holders, roles, strict=True):
        shape = holder.meta["val"].shape
        fitting = [n for n in operators if getattr(n.meta["val"], "shape", None) == shape]
        fitting = [n for n in fitting if root(n).op != "placeholder"]  # autograd copies those
        if role.kind == "constant" or not fitting or not draw(st.booleans()):
            continue
        kind = "gradient" if role.kind == "parameter" else "mutation"
        returned.append(draw(st.sampled_from(fitting)))
        outputs.append(OutputRole(kind, role.name))
    capture = Joint(
        graph=graph,
        placeholders=tuple(roles),
        outputs=(),
        report=Report(
            tensors={r.name: t for r, t in zip(roles, inputs, strict=True) if r.kind != "input"}
        ),
        training=any(role.kind == "gradient" for role in outputs),
        ipus=dict(enumerate(ipus)),
    )
    capture.set_returned(returned, outputs)
    check(capture)
    return capture, dict(zip(names, inputs, strict=True))


@given(case=placed_graphs())
def test_parts_compute_the_graph(case):
    capture, inputs = case
    expected = evaluate(capture, inputs)
    note(str(capture.graph.graph))
    partitioned = Partition("store")(capture)
    for part in partitioned.parts:
        note(f"{part.stage} {part.direction} {part.inputs} -> {part.outputs}\n{part.graph.graph}")
        part.graph.graph.lint()
        assert all("val" in node.meta for node in part.graph.graph.nodes)
    assert_same_bits(evaluate_parts(capture, partitioned, inputs), expected)


def assert_splits_well(capture, partitioned, inputs):
    """Splitting keeps every bit and line, makes every value before it is read, and ends."""
    expected = evaluate_parts(capture, partitioned, inputs)
    split = SplitWeightGradients()(partitioned)
    for part in split.parts:
        note(f"{part.stage} {part.direction} {part.inputs} -> {part.outputs}\n{part.graph.graph}")
        assert all("val" in node.meta for node in part.graph.graph.nodes)
    assert_same_bits(evaluate_parts(capture, split, inputs), expected)
    before, after = (
        {line for part in one.parts for line in lines_of(part.graph.graph.nodes)}
        for one in (partitioned, split)
    )
    assert after == before
    assert SplitWeightGradients()(split).parts == split.parts
    for part, after in pairwise(split.parts):
        if after.direction == "weights":
            assert (part.stage, part.gradients) == (after.stage, ())
            assert set(after.outputs) == {write.value for write in after.writes}
            assert after.gradients


@given(case=placed_graphs())
def test_split_parts_compute_the_graph(case):
    capture, inputs = case
    note(str(capture.graph.graph))
    assert_splits_well(capture, Partition("+=")(capture), inputs)


@given(case=placed_graphs(partly=True))
def test_gradients_are_placed_along_the_data(case):
    capture, inputs = case
    expected, graph = evaluate(capture, inputs), str(capture.graph.graph)
    AssignGradientStages()(capture)
    assert str(capture.graph.graph) == graph
    text = write_level(capture)
    assert not AssignGradientStages()(capture)
    assert write_level(capture) == text
    partitioned = Partition("store")(capture)
    assert_same_bits(evaluate_parts(capture, partitioned, inputs), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulation", ["store", "+=", "mean"])
@pytest.mark.quick(8)
@given(recipe=recipes(), training=st.booleans(), data=st.data())
def test_parts_compute_the_model(accumulation, recipe, training, data):
    model = recipe.build()
    placement = draw_placement(data, recipe)
    placement.place(model)
    enough = placement.micro_batches(training=training)
    options = Options(
        strategy=placement.strategy, gradient_accumulation=enough, device_iterations=enough
    )
    capture, _ = captured(model, recipe.data(1), options, training=training)
    inputs = named_inputs(model, recipe.data(1))
    expected = evaluate(capture, inputs)
    partitioned = Partition(accumulation)(capture)
    assert_close(evaluate_parts(capture, partitioned, inputs), expected)
    assert_splits_well(capture, partitioned, inputs)


def test_the_sum_of_a_serialised_gradient_and_another_lies_as_promised():
    steps = (Step("linear"), Step("serialized_rows", shares="tied"), Step("linear", x=1))
    recipe = Recipe(steps, width=2, rows=2, losses=("sum", "sum", "cross_entropy"))
    model, inputs = recipe.build(), recipe.data(1)
    capture, _ = captured(model, inputs, Options(), training=True)
    values = named_inputs(model, recipe.data(1))
    expected = evaluate(capture, values)
    partitioned = Partition("store")(capture)
    assert_close(evaluate_parts(capture, partitioned, values), expected)
