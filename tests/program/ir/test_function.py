"""Check which functions are equal, and how a function prints."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from ipu_dynamo.ops.operators import operator_named
from ipu_dynamo.program import make_function
from ipu_dynamo.program.ir.function import structural_key

aten = torch.ops.aten


def graph(build, *shapes, dtype=torch.float32, strides=None, names="abc"):
    """A graph of what `build(graph, *placeholders)` returns."""
    result, mode = fx.Graph(), FakeTensorMode()
    with mode:
        nodes = []
        for name, shape in zip(names, shapes, strict=False):
            node = result.placeholder(name)
            value = torch.empty(shape, dtype=dtype)
            node.meta["val"] = value if strides is None else value.as_strided(shape, strides)
            nodes.append(node)
        made = build(result, *nodes)
        for node in result.nodes:
            if node.op == "call_function":
                values = fx.node.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*values)
    result.output(made)
    return fx.GraphModule(torch.nn.Module(), result)


def scaled(factor, target=aten.mul.Tensor):
    return lambda g, a, b: (
        g.call_function(target, (a, factor)),
        g.call_function(aten.mm.default, (a, b)),
    )


def test_names_do_not_matter():
    first = graph(scaled(2.0), (2, 2), (2, 2))
    assert structural_key(first) == structural_key(graph(scaled(2.0), (2, 2), (2, 2), names="xyz"))


def test_what_is_computed_matters():
    keys = {
        structural_key(one)
        for one in (
            graph(scaled(2.0), (2, 2), (2, 2)),
            graph(scaled(3.0), (2, 2), (2, 2)),
            graph(scaled(2), (2, 2), (2, 2)),
            graph(scaled(2.0, aten.add.Tensor), (2, 2), (2, 2)),
            graph(lambda g, a, b: scaled(2.0)(g, b, a), (2, 2), (2, 2)),
            graph(lambda g, a, b: scaled(2.0)(g, a, b)[::-1], (2, 2), (2, 2)),
            graph(scaled(2.0), (2, 2), (2, 3)),
            graph(scaled(2.0), (2, 2), (2, 2), dtype=torch.float16),
            graph(scaled(2.0), (2, 2), (2, 2), strides=(1, 2)),
        )
    }
    assert len(keys) == 9


def test_function_knows_the_types_of_inputs_and_outputs():
    function = make_function("f", graph(scaled(2.0), (4, 2), (2, 3)))
    assert [str(t) for t in function.inputs] == ["f32[4,2]", "f32[2,3]"]
    assert [str(t) for t in function.outputs] == ["f32[4,2]", "f32[4,3]"]
    assert [node.target for node in function.operators] == [aten.mul.Tensor, aten.mm.default]


def test_functions_of_equal_graphs_are_equal_and_hash_alike():
    first, second = (make_function("f", graph(scaled(2.0), (2, 2), (2, 2))) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != make_function("f", graph(scaled(3.0), (2, 2), (2, 2)))


def test_listing_has_a_line_with_type_and_source_for_each_operator():
    module = graph(scaled(2.0), (2, 2), (2, 2))
    (multiply,) = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    multiply.meta["stack_trace"] = (
        '  File "/project/model.py", line 12, in forward\n    return x * 2'
    )
    function = make_function("f", module)
    first, second = function.listing().splitlines()
    assert first.split("#")[0].strip() == "%mul_tensor: f32[2,2] = aten.mul.Tensor(%a, 2.0)"
    assert first.endswith("# model.py:12 in forward: return x * 2")
    assert second.endswith("# unknown source")
    assert str(function) == "function @f(%a: f32[2,2], %b: f32[2,2]) -> (f32[2,2], f32[2,2])"


# --- What a function writes ----------------------------------------------------------------------


def writing(name, inputs, values):
    """A function of one call of an operator; `values` are its arguments, `At` stands for inputs."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(inputs)]
    args = fx.node.map_aggregate(values, lambda v: nodes[v.index] if isinstance(v, At) else v)
    graph.call_function(operator_named(name), *args)
    graph.output(())
    for node in nodes:
        node.meta["val"] = torch.empty(1)
    return make_function("f", fx.GraphModule(torch.nn.Module(), graph))


class At:
    """An input of a function."""

    def __init__(self, index):
        self.index = index


INPUTS = tuple(map(At, range(7)))
LOSS = (*INPUTS[:6], 1, -100, "output_channels", 2, True)
LOSS_STEP = (*INPUTS[:4], 1, -100, 2, True)


@pytest.mark.parametrize(
    ("name", "values", "written"),
    [
        ("aten.add_.Tensor", (INPUTS[1:3], {}), (1,)),
        ("aten.add.Tensor", (INPUTS[1:3], {}), ()),
        ("aten.add.out", (INPUTS[:2], {"out": INPUTS[3]}), (3,)),
        ("aten._foreach_add_.List", ((list(INPUTS[:3]), list(INPUTS[3:6])), {}), (0, 1, 2)),
        ("ipu.serialized_loss_backward_.default", ((*LOSS, INPUTS[6], False, True), {}), (6,)),
        ("ipu.serialized_loss_step_.default", ((*LOSS_STEP, INPUTS[6], False, True), {}), (6,)),
    ],
)
def test_all_arguments_that_a_schema_says_are_written(name, values, written):
    assert writing(name, 7, values).written == written


def test_an_input_is_written_through_views_of_it():
    def build(g, a, b):
        row = g.call_function(aten.select.int, (g.call_function(aten.t.default, (b,)), 0, 1))
        g.call_function(aten.copy_.default, (row, a))
        g.call_function(aten.neg_.default, (g.call_function(aten.clone.default, (a,)),))
        return (row,)

    assert make_function("f", graph(build, (2,), (2, 2))).written == (1,)
