"""Check that parameters train whose value nothing in the program reads."""

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    BeginBlock,
    CompileError,
    Options,
    Strategy,
    compile_training,
    identity_loss,
)


class Linear(nn.Module):
    """Its gradients are constants or inputs, and its loss is not returned."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        identity_loss((x * self.scale + self.shift).sum(), "none")
        return x * 2


class Behind(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), Linear()
        BeginBlock(self.second, ipu_id=1)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("model", [Linear, Behind])
def test_parameters_that_only_their_update_reads_are_trained(model, optimizer, accumulation):
    torch.manual_seed(0)
    plain, trained = model(), model()
    trained.load_state_dict(plain.state_dict())
    x = torch.rand(2 * accumulation, 3)
    of_plain = optimizer(plain.parameters(), lr=0.1)
    for part in x.chunk(accumulation):
        inner = plain.second if isinstance(plain, Behind) else plain
        hidden = plain.first(part) if isinstance(plain, Behind) else part
        ((hidden * inner.scale + inner.shift).sum() / accumulation).backward()
    of_plain.step()
    options = Options(
        gradient_accumulation=accumulation, engine="eager", strategy=Strategy("sharded")
    )
    compile_training(trained, optimizer(trained.parameters(), lr=0.1), options)(x)
    for (name, a), b in zip(plain.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")


class Late(nn.Module):
    """Its second layer is read once `deep` is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.deep = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x):
        h = self.first(x)
        return nn.functional.mse_loss(self.second(h) if self.deep else h, x)


def compiled_again(optimizer, *, deep):
    """Two steps, and two of a program that is compiled after them; also in plain PyTorch."""
    plain, trained = Late(), Late()
    of_plain = optimizer(plain.parameters(), lr=0.01)
    step = compile_training(trained, optimizer(trained.parameters(), lr=0.01), Options("eager"))
    for call in range(4):
        x = torch.randn(6, 3) if call < 2 else torch.randn(8, 3)
        if call == 2:
            plain.deep = trained.deep = deep
            step.compile(x)
        of_plain.zero_grad()
        plain(x).backward()
        of_plain.step()
        step(x)
    for (name, a), b in zip(plain.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [torch.optim.RAdam, torch.optim.NAdam, torch.optim.Adafactor])
def test_steps_are_traced_again_after_steps_without_some_parameters(optimizer):
    compiled_again(optimizer, deep=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [torch.optim.RAdam, torch.optim.Adafactor])
def test_a_parameter_whose_first_gradient_comes_late_is_refused(optimizer):
    with pytest.raises(CompileError, match=r"second\.bias has made no step"):
        compiled_again(optimizer, deep=True)
