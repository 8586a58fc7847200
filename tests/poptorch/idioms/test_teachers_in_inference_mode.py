"""Train next to layers that compute under `torch.inference_mode`, as in eager PyTorch."""

import copy

import pytest
import torch
from torch import nn

import poptorch


class Decorated(nn.Linear):
    @torch.inference_mode()
    def forward(self, x):
        return super().forward(x)


def in_a_region(model, x):
    with torch.inference_mode():
        y = model.teacher(x)
    return y.clone()


def with_gradients_in_a_region(model, x):
    with torch.inference_mode():
        with torch.enable_grad():
            y = model.teacher(x)
        y = model.teacher(y)
    return y.clone()


def outside_of_a_region_again(model, x):
    with torch.inference_mode(), torch.inference_mode(False):
        return model.teacher(x)


def switched_on_without_gradients(model, x):
    with torch.no_grad(), torch.inference_mode(False):
        return model.teacher(x)


def decorated(model, x):
    return model.decorated(x).clone()


class Net(nn.Module):
    def __init__(self, teach):
        super().__init__()
        self.teach = teach
        self.teacher, self.student, self.decorated = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            Decorated(3, 3),
        )

    def forward(self, x):
        taught = self.teach(self, x)
        return poptorch.identity_loss((self.student(x) + self.student(taught)).square(), "mean")


@pytest.mark.parametrize(
    "teach",
    [
        in_a_region,
        with_gradients_in_a_region,
        outside_of_a_region_again,
        switched_on_without_gradients,
        decorated,
    ],
)
def test_layers_train_as_in_eager_pytorch(teach):
    torch.manual_seed(0)
    model, x = Net(teach), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(executor(x), loss.detach())
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected)
