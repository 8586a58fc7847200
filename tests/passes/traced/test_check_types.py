"""Check that types without a kernel are refused when compiling, by the user's names; no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import CompileError, compile_inference, compile_training

EAGER = {"engine": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x)


def compiled(model, *inputs):
    compile_inference(model, {"engine": "eager"}).compile(*inputs)


@pytest.mark.parametrize(
    ("model", "x", "problem"),
    [
        (Net(), torch.ones(2, 4, dtype=torch.int64), "input x, which is torch.int64"),
        (Net(), torch.ones(2, 4, dtype=torch.float64), "input x, which is torch.float64"),
        (lambda x: F.gelu(x), torch.ones(3, dtype=torch.int32), "input x, which is torch.int32"),
        (lambda x: x.softmax(0), torch.ones(3, dtype=torch.int64), "input x, which is"),
        (
            lambda x: (x * 2).reshape(2, 2).softmax(0),
            torch.ones(4, dtype=torch.int32),
            "what comes from input x, in torch.int32",
        ),
        (
            lambda x: F.conv1d(x, torch.ones(1, 1, 2)),
            torch.ones(1, 1, 4, dtype=torch.int64),
            "input x, which is torch.int64",
        ),
    ],
)
def test_a_type_without_a_kernel_is_refused_by_the_name_of_its_input(model, x, problem):
    with pytest.raises(CompileError) as caught:
        compiled(model, x)
    text = str(caught.value)
    assert problem in text
    assert "test_check_types.py:" in text
    assert "convert it first" in text


def test_a_buffer_is_named():
    class Masked(Net):
        def forward(self, x):
            return F.linear(x, self.layer.weight, self.mask)

    with pytest.raises(CompileError, match=r"buffer mask, which is torch\.float64"):
        compiled(Masked(), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda x: F.embedding(x, torch.ones(1, 2)), (torch.zeros(3, dtype=torch.int64),)),
        (lambda x: 7 // (x + 1) + 7 % x, (torch.ones(3, dtype=torch.int32),)),
        (lambda x, i: x.gather(1, i), (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))),
        (lambda x, y: x + y, (torch.ones(2), torch.ones(2, dtype=torch.int64))),
        (lambda x: x[torch.arange(2)], (torch.ones(3),)),
        (lambda x: x.sum() & x.max(), (torch.ones(3, dtype=torch.bool),)),
        (lambda x: x @ x, (torch.ones(2, 2, dtype=torch.int64),)),
        (lambda x: torch.cat([x, x.int()]), (torch.ones(2),)),
        (lambda x: F.dropout(x.float(), 1.0), (torch.ones(2, dtype=torch.int64),)),
    ],
)
@pytest.mark.filterwarnings("ignore:the tensor .* is neither an input")
def test_what_eager_computes_is_not_refused(model, inputs):
    program = compile_inference(model, {"engine": "eager"})
    assert torch.equal(program(*inputs), model(*inputs))


def test_trying_a_type_draws_no_random_number():
    def model(x):
        return F.dropout(x, 0.5), x.int() + torch.randint(2, x.shape)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    compile_inference(model, {"engine": "eager", "seed": 1}).compile(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_targets_of_the_wrong_type_are_refused_in_training():
    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, y):
            return F.binary_cross_entropy_with_logits(self.layer(x), y)

    model = Regression()
    step = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), {"engine": "eager"})
    step.compile(torch.ones(2, 2), torch.ones(2, 2))
    other = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), {"engine": "eager"})
    with pytest.raises(CompileError, match=r"input x, which is torch\.int64"):
        other.compile(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2))


class UnderAutocast(nn.Module):
    """Autocast for all, and switched off for the last layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.second(torch.relu(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                result = self.last(h.float())
        return nn.functional.cross_entropy(result, y)


def test_autocast_in_forward_is_that_of_eager():
    model, expected = UnderAutocast(), UnderAutocast()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    assert torch.equal(compile_inference(model, EAGER)(x, y), expected(x, y))
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected))
    step = compile_training(model, optimizer, EAGER)
    for _ in range(3):
        reference.zero_grad()
        loss = expected(x, y)
        loss.backward()
        reference.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
