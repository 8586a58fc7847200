"""Check that operators of lists of tensors become operators of each tensor."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.capture.private.operator_log import OperatorLog
from ipu_dynamo.passes.update.tensorify_scalars import NumbersAsTensors

OF_TWO = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=0.5),
    "add a tensor": lambda a, b: torch._foreach_add(a, torch.tensor(0.25), alpha=2),
    "add numbers": lambda a, b: torch._foreach_add(a, [0.5, 1.5]),
    "sub": lambda a, b: torch._foreach_sub(a, b, alpha=0.5),
    "mul": torch._foreach_mul,
    "mul by a tensor": lambda a, b: torch._foreach_mul(a, torch.tensor(0.25)),
    "div": torch._foreach_div,
    "pow": lambda a, b: torch._foreach_pow(torch._foreach_abs(a), [2.0, 0.5]),
    "pow of a number": lambda a, b: torch._foreach_pow(2.0, b),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, a),
    "lerp by a number": lambda a, b: torch._foreach_lerp(a, b, 0.25),
    "lerp by numbers": lambda a, b: torch._foreach_lerp(a, b, [0.25, 0.5]),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, value=0.5),
    "addcdiv by numbers": lambda a, b: torch._foreach_addcdiv(a, a, b, [0.5, 2.0]),
    "addcdiv by a tensor": lambda a, b: torch._foreach_addcdiv(a, a, b, torch.tensor([0.5, 2.0])),
    "maximum": torch._foreach_maximum,
    "maximum of a number": lambda a, b: torch._foreach_maximum(a, 0.25),
    "minimum of numbers": lambda a, b: torch._foreach_minimum(a, [0.25, 0.0]),
    "clamp_max": lambda a, b: torch._foreach_clamp_max(a, b),
    "clamp_min to a number": lambda a, b: torch._foreach_clamp_min(a, 0.25),
    "norm": lambda a, b: torch._foreach_norm(a),
    "norm of order 1": lambda a, b: torch._foreach_norm(a, 1),
    "largest norm": lambda a, b: torch._foreach_norm(a, ord=float("inf"), dtype=torch.float64),
    "max": lambda a, b: torch._foreach_max(a),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "sign": lambda a, b: torch._foreach_sign(a),
    "reciprocal": lambda a, b: torch._foreach_reciprocal(b),
    "copy": lambda a, b: torch.ops.aten._foreach_copy(a, b),
    "zero": lambda a, b: torch.ops.aten._foreach_zero(a),
}


@pytest.mark.parametrize("name", OF_TWO)
def test_each_tensor_is_computed_by_itself(name):
    def run(*tensors):
        return OF_TWO[name](list(tensors[:2]), list(tensors[2:]))

    generator = torch.Generator().manual_seed(0)
    shapes = (3, 4), (5,)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes * 2]
    graph = make_fx(run)(*tensors)
    assert any("_foreach_" in str(node.target) for node in graph.graph.nodes)
    owned = [(tensor, place % 2, str(place)) for place, tensor in enumerate(tensors)]
    with OperatorLog(owned):  # which refuses operators that take what several own
        found = NumbersAsTensors(graph, halves=False).run(*tensors)
    for one, other in zip(found, run(*tensors), strict=True):
        torch.testing.assert_close(one, other)
