"""Check that sums of gradients are taken apart, however many terms they have."""

import torch
from torch import fx

from ipu_dynamo.passes.graph.gradient_sums import erase_unread, sum_of

aten = torch.ops.aten
MANY = 3000  # three times Python's limit on calls within calls


def sum_of_squares(count):
    """A graph of the squares of inputs, their sum one after the other, and its reader."""
    graph = fx.Graph()
    value = torch.empty(2)
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]
    terms = [graph.call_function(aten.mul.Tensor, (x, x)) for x in inputs]
    sums = terms[:1]
    for term in terms[1:]:
        sums.append(graph.call_function(aten.add.Tensor, (sums[-1], term)))
    reader = graph.call_function(aten.neg.default, (sums[-1],))
    for node in graph.nodes:
        node.meta["val"] = value
    graph.output(())
    return graph, terms, sums[1:], reader


def test_a_chain_has_its_terms_in_order_and_its_last_addition_first():
    _, terms, sums, reader = sum_of_squares(MANY)
    assert sum_of(reader, sums[-1]) == (terms, sums[::-1])


def test_both_arguments_of_an_addition_are_taken_apart():
    graph, terms, _, reader = sum_of_squares(4)
    a, b, c, d = terms
    with graph.inserting_before(reader):
        left = graph.call_function(aten.add.Tensor, (a, b))
        right = graph.call_function(aten.add.Tensor, (c, d))
        both = graph.call_function(aten.add.Tensor, (left, right))
    for node in (left, right, both):
        node.meta["val"] = torch.empty(2)
    reader.args = (both,)
    assert sum_of(reader, both) == ([a, b, c, d], [both, left, right])


def test_a_sum_that_is_read_twice_or_has_a_number_is_one_term():
    graph, terms, sums, reader = sum_of_squares(3)
    first, last = sums
    with graph.inserting_before(reader):
        graph.call_function(aten.neg.default, (first,))
    assert sum_of(reader, last) == ([first, terms[2]], [last])
    last.args = (first, 1.0)
    assert sum_of(reader, last) == ([last], [])


def test_all_that_only_a_long_chain_read_is_erased():
    graph, terms, _, reader = sum_of_squares(MANY)
    first = terms[0]
    graph.output_node().args = ((first,),)
    erase_unread(reader)
    assert [node for node in graph.nodes if node.op == "call_function"] == [first]
