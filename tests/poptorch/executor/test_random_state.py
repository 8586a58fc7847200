"""Check `rng_state`: what it counts, and that a state set again repeats what followed it."""

import pytest
import torch
from torch import nn

import poptorch


class Noise(nn.Module):
    """Draw without an input that matters."""

    def forward(self, x):
        return x + torch.rand_like(x)


ROWS = torch.zeros(4, 3)


def inference(iterations=1, seed=7):
    options = poptorch.Options().deviceIterations(iterations)
    if seed is not None:
        options.randomSeed(seed)
    return poptorch.inferenceModel(Noise(), options)


def test_counts_the_steps_since_the_seed_was_set():
    executor = inference(iterations=2)
    executor.compile(ROWS)
    assert executor.rng_state == [7, 0]
    executor(ROWS)
    executor(ROWS)
    assert executor.rng_state == [7, 4]
    executor.rng_state = [11]
    assert executor.rng_state == [11, 0]


def test_a_state_set_again_repeats_the_following_runs():
    executor = inference(seed=None)
    executor(ROWS)
    state = executor.rng_state
    following = [executor(ROWS), executor(ROWS)]
    assert not torch.equal(*following)
    executor.detachFromDevice()
    executor.attachToDevice()
    executor.rng_state = state
    assert [torch.equal(executor(ROWS), run) for run in following] == [True, True]


def test_another_executor_goes_on_from_a_state():
    first, second = inference(seed=1), inference(seed=2)
    first(ROWS)
    second.compile(ROWS)
    second.rng_state = first.rng_state
    assert torch.equal(first(ROWS), second(ROWS))


def test_training_counts_updates():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            out = nn.functional.dropout(self.layer(x))
            return out, poptorch.identity_loss(out, "sum")

    options = poptorch.Options().deviceIterations(3).randomSeed(5)
    options.Training.gradientAccumulation(2)
    model = Noisy()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    x = torch.ones(12, 3)
    first, _ = executor(x)
    assert executor.rng_state == [5, 3]
    executor.rng_state = [5, 0]
    again, _ = executor(x)
    assert torch.equal(first, again)


@pytest.mark.parametrize("state", [[], [1, 2, 3], ["1"], [1, -1], 3, [True]])
def test_refuses_what_is_no_state(state):
    executor = inference()
    executor.compile(ROWS)
    with pytest.raises(poptorch.Error, match="rng_state takes"):
        executor.rng_state = state
    assert executor.rng_state == [7, 0]


def test_needs_a_compiled_model():
    executor = inference()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        _ = executor.rng_state
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor.rng_state = [1]
