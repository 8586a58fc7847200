"""Check that programs keep the checks of linear algebra."""

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.linalg.inv(self.scale * x), x)


def through_torch_compile(model, engine):
    return torch.compile(model, backend=ipu, fullgraph=True, options={"engine": engine})


def as_a_whole_step(model, engine):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return ipu_dynamo.compile_training(model, optimizer, ipu_dynamo.Options(engine=engine))


@pytest.mark.parametrize(
    ("door", "engine"),
    [
        (through_torch_compile, "eager"),
        pytest.param(through_torch_compile, "inductor", marks=pytest.mark.inductor),
        (as_a_whole_step, "eager"),
    ],
)
def test_a_singular_matrix_is_an_error_when_the_program_runs(door, engine):
    model, x = Inverse(), torch.eye(3) + 0.1 * torch.randn(3, 3)
    run = door(model, engine)
    torch.testing.assert_close(run(x), model(x))
    with pytest.raises(
        ipu_dynamo.ExecutionError, match=r"(?s)singular.*test_checks.py.*linalg.inv"
    ):
        run(torch.ones(3, 3))
    torch.testing.assert_close(run(x), model(x))
