"""Check CTC losses in programs against PyTorch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import Options

LAYOUTS = ["padded", "in a row", "one sequence"]


class Model(nn.Module):
    """Log-probabilities that are parameters, and their loss."""

    def __init__(self, log_probs, *, in_forward=(), **settings):
        super().__init__()
        self.scores = nn.Parameter(log_probs)
        self.lengths, self.settings = in_forward, settings

    def forward(self, targets, *lengths):
        probs = self.scores.log_softmax(-1)
        loss = F.ctc_loss(probs, targets, *(self.lengths or lengths), **self.settings)
        return loss * 1.0 if loss.dim() == 0 else loss.sum(), loss


def one_step(model, *inputs, engine="eager"):
    """The loss, and the gradient, of a step of a program."""
    before = model.scores.detach().clone()
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=1.0), Options(engine=engine), loss=0
    )
    _, loss = step(*inputs)
    return loss, before - model.scores.detach()


@pytest.mark.examples(10)
@given(
    st.integers(0, 9),
    st.sampled_from(["none", "mean", "sum"]),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 3),
)
def test_losses_and_gradients_are_pytorchs(seed, reduction, zero_infinity, layout, dtype, blank):
    torch.manual_seed(seed)
    scores = torch.randn(7, 3, 4, dtype=dtype)
    labels = torch.tensor([c for c in range(4) if c != blank])
    targets = labels[torch.randint(3, (3, 3))]
    times, lengths = torch.tensor([7, 6, 3]), torch.tensor([3, 2, 0])
    if layout == "in a row":
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    if layout == "one sequence":
        scores, targets = scores[:, 0].contiguous(), targets[0]
        times, lengths = times[0], lengths[0]
    if zero_infinity:  # too short for what is to be said: the loss is infinite
        times = times.clone()
        (times[0] if times.dim() else times).fill_(1)
    settings = {"reduction": reduction, "zero_infinity": zero_infinity, "blank": blank}
    wanted = scores.clone().requires_grad_()
    expected = F.ctc_loss(wanted.log_softmax(-1), targets, times, lengths, **settings)
    expected.sum().backward()
    loss, gradient = one_step(Model(scores, **settings), targets, times, lengths)
    assert torch.allclose(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(gradient, wanted.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_lengths_may_be_numbers_and_change_from_call_to_call(engine):
    torch.manual_seed(0)
    scores, targets = torch.randn(5, 2, 3), torch.tensor([[1, 2], [2, 0]])
    numbers = Model(scores.clone(), in_forward=((5, 4), (2, 1)))
    expected = F.ctc_loss(scores.log_softmax(-1), targets, (5, 4), (2, 1))
    assert torch.allclose(one_step(numbers, targets, engine=engine)[0], expected)
    model = Model(scores.clone())
    compiled = ipu_dynamo.compile_inference(model, Options(engine=engine))
    for times, lengths in (((5, 4), (2, 1)), ((3, 5), (1, 0))):
        found, _ = compiled(targets, torch.tensor(times), torch.tensor(lengths))
        expected = F.ctc_loss(scores.log_softmax(-1), targets, times, lengths)
        assert torch.allclose(found, expected)


def test_half_precision_is_computed_in_float32():
    torch.manual_seed(0)
    scores, targets = torch.randn(9, 2, 3).half(), torch.tensor([[1, 2], [2, 0]])
    lengths = torch.tensor([9, 8]), torch.tensor([2, 1])
    wanted = scores.float().log_softmax(-1).half().float().requires_grad_()
    expected = F.ctc_loss(wanted, targets, *lengths)
    loss, gradient = one_step(Model(scores), targets, *lengths)
    assert loss.dtype == gradient.dtype == torch.float16
    assert torch.allclose(loss.float(), expected, rtol=2e-3)


class Recogniser(nn.Module):
    """A layer and the loss that it trains by, which nothing names."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, targets):
        return nn.CTCLoss()(self.layer(x).log_softmax(-1), targets, (6, 5), (2, 1))


def test_a_ctc_loss_is_found_as_the_loss():
    torch.manual_seed(0)
    model, plain = Recogniser(), Recogniser()
    plain.load_state_dict(model.state_dict())
    x, targets = torch.randn(6, 2, 4), torch.tensor([[1, 2], [2, 0]])
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, plain)]
    loss = ipu_dynamo.compile_training(model, optimizers[0], Options(engine="eager"))(x, targets)
    expected = plain(x, targets)
    expected.backward()
    optimizers[1].step()
    assert torch.allclose(loss, expected)
    assert torch.allclose(model.layer.weight, plain.layer.weight, atol=1e-6)


def test_such_a_program_is_saved(tmp_path):
    scores = torch.randn(5, 2, 3)
    compiled = ipu_dynamo.compile_inference(Model(scores), Options(engine="eager"))
    inputs = torch.tensor([[1, 2], [2, 0]]), torch.tensor([5, 4]), torch.tensor([2, 1])
    expected, _ = compiled(*inputs)
    ipu_dynamo.save(compiled, tmp_path / "program")
    assert torch.equal(ipu_dynamo.load(tmp_path / "program")(*inputs)[0], expected)
