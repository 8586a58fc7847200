"""Check in which dtypes `compile_training` sums the gradients of single parameters."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import TracedUpdate, identity_loss
from ipu_dynamo.errors import OptionError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return identity_loss(self.fc(x).square(), "mean")


def descend(gradients, weights, states, numbers):
    return {n: weights[n] - 0.1 * g for n, g in gradients.items()}, {}


@pytest.mark.parametrize("traced", [False, True])
def test_each_parameter_has_its_own_dtype(traced):
    model, plain = Model(), Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ipu_dynamo.compile_training(
        model,
        TracedUpdate({}, descend) if traced else sgd,
        {"engine": "eager", "gradient_accumulation": 3, "reduction": "sum"},
        accumulator_dtypes={"fc.weight": torch.float64},
    )
    x = torch.randn(6, 3)
    step(x)
    sums = {v.name: v.type.dtype for v in step.program.variables if v.kind == "accumulator"}
    assert sums == {"fc.weight..grad": torch.float64, "fc.bias..grad": torch.float32}
    sum(plain(part) for part in x.split(2)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b - 0.1 * b.grad, rtol=1e-5, atol=1e-6)


def test_a_dtype_that_is_not_floating_is_refused():
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"int32 for fc\.bias"):
        ipu_dynamo.compile_training(model, sgd, accumulator_dtypes={"fc.bias": torch.int32})
