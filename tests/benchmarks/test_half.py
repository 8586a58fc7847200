"""Check that training in half precision is as exact as eager PyTorch's."""

import copy
from dataclasses import replace

import pytest
import torch

from benchmarks.training import half_language_model
from benchmarks.work import by, loop, whole

STEPS = 50


def _distance(model, exact):
    """How far weights are from exact ones, a norm over all."""
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return torch.stack([(a.detach().double() - b.detach()).norm() for a, b in pairs]).norm()


@pytest.mark.slow
@pytest.mark.inductor
def test_training_in_float16_is_as_exact_as_eagers():
    torch.manual_seed(0)
    work = half_language_model()
    inputs = tuple(tensor[: 2 * work.rows] for tensor in work.inputs)
    work = replace(work, optimizer=by(torch.optim.SGD, lr=0.1), inputs=inputs, accumulation=2)
    exact, eager, own = (copy.deepcopy(work.model) for _ in range(3))
    for make, model in ((loop, exact.double()), (loop, eager), (whole, own)):
        step = make(replace(work, model=model))
        for _ in range(STEPS):
            step()
    way, of_eager, of_own = (_distance(model, exact) for model in (work.model, eager, own))
    assert 0 < of_eager < way
    assert of_own <= 1.05 * of_eager
