"""Check that pieces of a graph compute what the graph does, and keep what is known of it."""

from operator import getitem

from hypothesis import given, note
from hypothesis import strategies as st
from torch import fx

from ipu_dynamo.ops.graph_queries import is_view, makes_constant
from ipu_dynamo.passes.graph.extract import Cut, Extraction, subgraph
from ipu_dynamo.testing import assert_same_bits, aten_graphs


def operators_of(graph):
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def drawn_cut(draw, graph, repeats):
    """Places that ascend along the graph's edges; parts of a result lie where that is made."""
    place = {}
    for node in operators_of(graph):
        least = max((place.get(source, 0) for source in node.all_input_nodes), default=0)
        own = node.target is getitem or is_view(node)
        place[node] = least if own else draw(st.integers(least, 3))
    inputs = {node: f"the {node.name}" for node in graph.graph.find_nodes(op="placeholder")}
    return Cut(place, inputs, lambda node: f"{node.name}, made", repeats)


def nothing(node, index):
    return False


def looks(node, index):
    return makes_constant(node) or is_view(node)


@given(
    case=aten_graphs(), repeats=st.sampled_from([lambda node, index: False, looks]), data=st.data()
)
def test_pieces_compute_what_the_graph_does(case, repeats, data):
    graph, tensors = case
    cut = drawn_cut(data.draw, graph, repeats)
    extraction = Extraction(cut, range(4))
    extraction.fill()
    returned = graph.graph.output_node().args[0]
    names = [cut.inputs.get(node) or extraction.output(node) for node in returned]
    copied = [node for piece in extraction.pieces.values() for node in piece.graph.nodes]
    assert {n.meta.get("stack_trace") for n in copied} >= {n.meta["stack_trace"] for n in cut.place}
    values = dict(zip(cut.inputs.values(), tensors, strict=True))
    for piece in extraction.pieces.values():
        piece.prune(lambda node: True)
        module = piece.finish()
        note(str(module.graph))
        assert all("val" in node.meta for node in module.graph.nodes)
        results = module(*(values[name] for name in piece.inputs))
        assert not values.keys() & piece.outputs.keys()
        values |= zip(piece.outputs, results, strict=True)
    assert_same_bits(tuple(values[name] for name in names), graph(*tensors))


@given(case=aten_graphs(), data=st.data())
def test_a_subgraph_computes_its_nodes_from_its_inputs(case, data):
    graph, tensors = case
    nodes = operators_of(graph)
    start = data.draw(st.integers(0, len(nodes)))
    before, inside = nodes[:start], nodes[start:]
    inputs = [*graph.graph.find_nodes(op="placeholder"), *before]
    found, copies = subgraph(inside, inputs, lambda node: f"given_{node.name}")
    returned = graph.graph.output_node().args[0]
    found.output(tuple(copies[node] for node in returned))
    found.lint()
    values = everything(graph, tensors)
    given = [values[node] for node in inputs]
    assert_same_bits(fx.GraphModule({}, found)(*given), graph(*tensors))


def everything(graph, tensors):
    """The value of every node."""
    values = dict(zip(graph.graph.find_nodes(op="placeholder"), tensors, strict=True))
    for node in operators_of(graph):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    return values
