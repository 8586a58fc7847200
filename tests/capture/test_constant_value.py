"""Check which values of a trace are known to be made of constants alone."""

import torch

from ipu_dynamo.capture.private.tracing import constant_value, fake_mode, to_fake, trace_once

HELD = torch.tensor([3.0])


def traced(function):
    """What `function` returns while it is traced on one input."""
    mode, found = fake_mode(), []

    def run(x):
        found.append(function(x))
        return x + 1

    trace_once(run, [to_fake(mode, torch.ones(2))], mode)
    return found[0]


def test_values_made_of_numbers_and_held_tensors_are_known():
    assert traced(lambda x: constant_value(torch.full((), 1.5) * 2 == 3.0)).item() is True
    assert traced(lambda x: constant_value(HELD * torch.tensor(2.0))).item() == 6.0
    assert traced(lambda x: constant_value(torch.zeros_like(x).new_ones(3).sum())) is None


def test_values_that_hang_on_inputs_or_chance_are_not():
    assert traced(lambda x: constant_value(x.sum() > 0)) is None
    assert traced(lambda x: constant_value(torch.rand(()) > 2)) is None


def test_nothing_is_known_outside_of_a_trace():
    assert constant_value(torch.ones(())) is None
