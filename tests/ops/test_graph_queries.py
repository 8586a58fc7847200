"""Check what is said of single nodes: views, writes, constants."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.node import map_aggregate

import ipu_dynamo.ops.serialized_loss
from ipu_dynamo.ops.graph_queries import (
    is_view,
    makes_constant,
    only_looks,
    owner,
    root,
    writes,
    written_arguments,
)

aten = torch.ops.aten


def graph_of(count):
    graph = fx.Graph()
    return graph, [graph.placeholder(f"x{i}") for i in range(count)]


def test_one_of_several_views_is_a_view_and_one_of_several_results_is_not():
    graph, (x,) = graph_of(1)
    split = graph.call_function(aten.split.Tensor, (x, 2))
    part = graph.call_function(operator.getitem, (split, 0))
    maximum = graph.call_function(aten.max.dim, (x, 0))
    value = graph.call_function(operator.getitem, (maximum, 0))
    assert is_view(part)
    assert not is_view(value)
    assert only_looks(part)
    assert only_looks(value)
    assert (root(part), root(value)) == (x, value)
    assert (owner(part), owner(value)) == (x, maximum)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "written"),
    [
        (aten.add_.Tensor, (0, 1), {}, [0]),
        (aten.add.out, (0, 1), {"out": 2}, [2]),
        (aten._foreach_add_.List, ([0, 1], [2, 3]), {}, [0, 1]),
        (aten._fused_adam_.default, ([0], [1], [2], [3], [], [4]), {"lr": 0.1}, [0, 1, 2, 3]),
        (aten.add.Tensor, (0, 1), {}, []),
        (aten.t.default, (0,), {}, []),
    ],
)
def test_written_arguments_are_those_of_the_schema(target, args, kwargs, written):
    graph, inputs = graph_of(5)
    args, kwargs = map_aggregate((args, kwargs), lambda n: inputs[n] if isinstance(n, int) else n)
    node = graph.call_function(target, args, kwargs)
    assert list(written_arguments(node)) == [inputs[place] for place in written]
    assert writes(node) == bool(written)


def test_operators_of_ours_say_all_that_they_write():
    backward = torch.ops.ipu.serialized_loss_backward_.default
    names = [argument.name for argument in backward._schema.arguments]
    graph, inputs = graph_of(len(names))
    node = graph.call_function(backward, tuple(inputs))
    assert [inputs.index(argument) for argument in written_arguments(node)] == [
        place
        for place, argument in enumerate(backward._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert len(written_arguments(node)) > 0
    assert ipu_dynamo.ops.serialized_loss.__name__.startswith("ipu_dynamo.ops")


def test_random_numbers_are_no_constant():
    graph, _ = graph_of(0)
    assert makes_constant(graph.call_function(aten.full.default, ([2], 1.0)))
    assert not makes_constant(graph.call_function(aten.rand.default, ([2],)))
