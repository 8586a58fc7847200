"""Check LAMB's step against its equations in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program.ir.update_rules import LAMB
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from tests.runtime.update.test_parameter_update import (
    STEPS,
    assert_close,
    decays,
    fractions,
    random_tensors,
    rates,
    train,
)


def reference(values, *, uncorrected, divisor, dtype):
    """The weights after some steps, each from the equations alone."""
    lr, beta1, beta2, eps, decay, largest = values
    weights = [w.double() for w in random_tensors(0, dtype)]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, STEPS + 1):
        for i, gradient in enumerate(random_tensors(step, dtype)):
            g = gradient.double() / divisor
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            counts = (1, 1) if uncorrected else (1 - beta1**step, 1 - beta2**step)
            m, v = first[i] / counts[0], second[i] / counts[1]
            x = m / (v.sqrt() + eps) + decay * weights[i]
            norms = min(weights[i].norm().item(), largest), x.norm().item()
            trust = norms[0] / norms[1] if all(norms) else 1.0
            weights[i] = weights[i] - lr * trust * x
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@given(
    lr=rates,
    betas=st.tuples(fractions, fractions),
    eps=st.sampled_from((1e-6, 1e-2)),
    decay=decays,
    largest=st.sampled_from((65500.0, 1.5, 0.0)),
    uncorrected=st.booleans(),
    divisor=st.sampled_from((1.0, 4.0)),
)
def test_steps_follow_the_equations(
    dtype, tolerance, lr, betas, eps, decay, largest, uncorrected, divisor
):
    values = (lr, *betas, eps, decay, largest)
    scale = None if divisor == 1.0 else GradientScale(divisor)
    found, _ = train(LAMB(uncorrected=uncorrected), lambda step: values, dtype, scale=scale)
    expected = reference(values, uncorrected=uncorrected, divisor=divisor, dtype=dtype)
    assert_close(found, expected, tolerance)


def test_half_weights_with_float_moments_are_rounded_once():
    rule = LAMB(exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32)
    values = (0.1, 0.9, 0.99, 1e-6, 0.01, 65500.0)
    halves, states = train(rule, lambda step: values, torch.float16, steps=1)
    wide, _ = train(rule, lambda step: values, torch.float32, steps=1)
    assert {s.dtype for s in states["exp_avg"]} == {torch.float32}
    assert_close(halves, wide, 3e-3)
