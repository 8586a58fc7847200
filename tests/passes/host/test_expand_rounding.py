"""Check that rounding at random is one operator until code is made of it, with the same bits."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from ipu_dynamo import compile_inference
from ipu_dynamo.ops.precision.stochastic_rounding import round_stochastically_op
from ipu_dynamo.passes.host.recipes.expand_rounding import apply
from ipu_dynamo.program import make_function

LAYOUTS = [
    torch.randn(3, 4),
    torch.randn(3, 4).t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(6, 4)[::2, 1:3],
    torch.randn(3, 1).expand(3, 4),
    torch.randn(1, 4, 1).transpose(0, 2),
    torch.randn(1, 3, 1, 5).transpose(1, 3)[..., :2],
    torch.randn(3, 4, 2).double().permute(1, 2, 0),
    torch.randn(()),
    torch.randn(0, 3),
]
WORDS = torch.tensor(17, dtype=torch.int32), torch.tensor(-(2**30), dtype=torch.int32)


@pytest.mark.parametrize("x", LAYOUTS)
def test_the_operators_give_the_bits_and_the_layout_of_the_one(x):
    expected = round_stochastically_op(x, *WORDS)
    mode = FakeTensorMode()
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "first", "second")]
    for node, tensor in zip(inputs, (x, *WORDS), strict=True):
        node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
    rounded = graph.call_function(round_stochastically_op, tuple(inputs))
    with mode:
        rounded.meta["val"] = round_stochastically_op(*(node.meta["val"] for node in inputs))
    graph.output((rounded,))
    assert rounded.meta["val"].stride() == expected.stride()
    expanded = apply(make_function("f", fx.GraphModule({}, graph)))
    assert not expanded.graph.graph.find_nodes(op="call_function", target=round_stochastically_op)
    (found,) = expanded.graph(x, *WORDS)
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


def test_a_rounding_is_one_operator_of_a_program():
    compiled = compile_inference(
        lambda x: (x * 2).tanh(), {"engine": "eager", "stochastic_rounding": True}
    )
    compiled(torch.randn(4).half())
    (function,) = compiled.program.functions
    targets = [node.target for node in function.operators]
    assert targets.count(round_stochastically_op) == 2
    assert len(targets) < 15
