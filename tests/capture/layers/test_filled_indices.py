"""Check that a value which is filled in at indices can be learned."""

import copy

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Options


class Filling(nn.Module):
    """`x`, and a copy that is changed in place, with learned values at indices."""

    def __init__(self, dim: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.dim = dim
        self.x = nn.Parameter(torch.linspace(-1, 2, max(1, torch.Size(shape).numel())).view(shape))
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, index):
        y = (self.x * 1).index_fill(self.dim, index, self.value * 3)
        z = torch.index_fill(self.x, self.dim, index=index, value=4.0)
        w = self.x * 2
        w.index_fill_(self.dim, index, self.value)
        loss = y.tanh().sum() + z.tanh().sum() + w.square().sum()
        return ipu_dynamo.identity_loss(loss, "none"), y, z, w


@pytest.mark.parametrize(
    ("dim", "shape", "index"),
    [(0, (4, 3), [0, 2, 2]), (-1, (4, 3), [1, 2]), (1, (2, 3, 2), []), (0, (), [0])],
)
def test_a_value_that_is_filled_in_is_learned(dim, shape, index):
    model, index = Filling(dim, shape), torch.tensor(index, dtype=torch.long)
    plain = copy.deepcopy(model)
    loss, *expected = plain(index)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ipu_dynamo.compile_training(model, optimizer, Options(engine="eager"))
    found = step(index)
    torch.testing.assert_close(found, (loss.detach(), *(t.detach() for t in expected)))
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
