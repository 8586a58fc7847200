"""Check LAMB's step on the host against its equations in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poptorch.optim import LAMB


def reference(weight, gradients, *, lr, betas, eps, decay, correct, largest):
    """The weight after one step per gradient, in float64."""
    weight = weight.double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for count, gradient in enumerate(gradients, start=1):
        gradient = gradient.double()
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient * gradient
        mean = first / (1 - betas[0] ** count) if correct else first
        square = second / (1 - betas[1] ** count) if correct else second
        move = mean / (square.sqrt() + eps) + decay * weight
        weight_norm, move_norm = min(weight.norm().item(), largest), move.norm().item()
        trust = weight_norm / move_norm if weight_norm and move_norm else 1.0
        weight = weight - lr * trust * move
    return weight


@given(
    seed=st.integers(0, 99),
    steps=st.integers(1, 4),
    correct=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    largest=st.sampled_from([0.1, 65500.0]),
    scale=st.sampled_from([0.0, 1.0]),
)
def test_steps_follow_the_equations(seed, steps, correct, decay, largest, scale):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(scale * torch.randn(3, 4, generator=generator))
    gradients = [torch.randn(3, 4, generator=generator) for _ in range(steps)]
    settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6}
    start = weight.detach().clone()
    optimizer = LAMB(
        [weight],
        **settings,
        weight_decay=decay,
        bias_correction=correct,
        max_weight_norm=largest,
        loss_scaling=8.0,  # scales no gradient on the host
    )
    for gradient in gradients:
        weight.grad = gradient.clone()
        assert optimizer.step() is None
    expected = reference(
        start, gradients, **settings, decay=decay, correct=correct, largest=largest
    )
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_zero_gradients_without_decay_move_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    LAMB([weight], weight_decay=0.0).step()
    assert torch.equal(weight.detach(), torch.ones(3))


def test_weights_and_moments_keep_their_types():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = LAMB([weight], lr=0.1, first_order_momentum_accum_type=torch.float16)
    weight.grad = torch.ones(3, dtype=torch.float16)
    optimizer.step()
    state = optimizer.state[weight]
    assert weight.dtype == state["exp_avg"].dtype == torch.float16
    assert state["exp_avg_sq"].dtype == torch.float32
    assert state["step"] == 1
    assert (weight < 1).all()


def test_a_closure_is_evaluated_with_gradients_and_parameters_without_one_stay():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = LAMB([used, unused], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (used < 1).all()
    assert torch.equal(unused.detach(), torch.ones(2))


@pytest.mark.parametrize("setting", ["lr", "max_weight_norm"])
def test_groups_have_their_own_values(setting):
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    value = {"lr": 0.01, "max_weight_norm": 0.5}[setting]
    optimizer = LAMB([{"params": [first], setting: value}, {"params": [second]}], lr=0.1)
    for weight in (first, second):
        weight.grad = torch.ones(4)
    optimizer.step()
    assert (first > second).all()
