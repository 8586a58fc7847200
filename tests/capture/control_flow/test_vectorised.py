"""Check `torch.vmap` in whole steps against plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import CompileError, Options

X, Y = torch.randn(4, 3), torch.randn(4, 3)


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rows = rows

    def forward(self, x, y):
        return F.mse_loss(self.rows(self, x), y)


ROWS = {
    "a layer": lambda self, x: torch.vmap(lambda row: self.layer(row).tanh() * 2)(x),
    "two dimensions": lambda self, x: torch.vmap(
        torch.vmap(lambda a, w: a * w.sum(), (0, None)), (0, None)
    )(x, self.layer.weight),
    "weights by row": lambda self, x: torch.vmap(torch.mv)(self.layer.weight.expand(4, 3, 3), x),
    "a dictionary, and out dimensions": lambda self, x: torch.vmap(
        lambda row: {"y": self.layer(row), "n": row.sum()}, out_dims={"y": 1, "n": 0}
    )(x)["y"].t(),
    "a detached value": lambda self, x: torch.vmap(
        lambda row: self.layer(row).detach() + self.layer.bias
    )(x),
    "a change in place": lambda self, x: torch.vmap(
        lambda row: self.layer(row).clone().mul_(2).add_(row)
    )(x),
    "chunks": lambda self, x: torch.vmap(self.layer, chunk_size=3)(x),
}


@pytest.mark.parametrize("name", ROWS)
def test_loss_and_weights_are_those_of_pytorch(name):
    model = Model(ROWS[name])
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    found = ipu_dynamo.compile_training(model, optimizers[0], Options(engine="eager"))(X, Y)
    expected = plain(X, Y)
    expected.backward()
    optimizers[1].step()
    assert torch.allclose(found, expected)
    assert torch.allclose(model.layer.weight, plain.layer.weight, atol=1e-6)
    assert torch.allclose(model.layer.bias, plain.layer.bias, atol=1e-6)
    compiled = ipu_dynamo.compile_inference(plain, Options(engine="eager"))
    assert torch.allclose(compiled(X, Y), plain(X, Y))


def test_random_numbers_of_rows_differ_where_asked_to():
    def forward(x):
        same = torch.vmap(lambda row: row + torch.rand(2), randomness="same")(x)
        different = torch.vmap(lambda row: row + torch.rand(2), randomness="different")(x)
        return same, different

    same, different = ipu_dynamo.compile_inference(forward, Options(engine="eager", seed=3))(
        torch.zeros(4, 2)
    )
    assert len(same.unique()) == 2
    assert len(different.unique()) == 8


def test_an_error_within_names_the_line():
    compiled = ipu_dynamo.compile_inference(
        lambda x: torch.vmap(lambda row: row * row.sum().item())(x), Options(engine="eager")
    )
    with pytest.raises((CompileError, RuntimeError)) as caught:
        compiled(X)
    assert "test_vectorised.py" in f"{caught.value}{getattr(caught.value, '__notes__', '')}"


def test_jacobians_of_torch_func_are_refused_with_the_line():
    compiled = ipu_dynamo.compile_inference(
        lambda x: torch.func.jacrev(lambda x: (x**2).sum())(x), Options(engine="eager")
    )
    with pytest.raises(CompileError, match=r"by torch\.func[^$]*test_vectorised\.py"):
        compiled(X)


def test_gradients_of_rows_are_those_of_pytorch():
    def forward(x):
        return torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(x)

    compiled = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    assert torch.equal(compiled(X), forward(X))
