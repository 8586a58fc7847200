"""Run drawn models as programs, in the ways that the properties compare."""

import copy

import pytest
import torch
from hypothesis import strategies as st

from ipu_dynamo import compile_inference, compile_training
from ipu_dynamo.options import Options
from ipu_dynamo.testing import (
    Reference,
    assert_same_inference,
    assert_same_training,
    placements_of,
    with_enough_digits,
)
from ipu_dynamo.testing.batchings import micro_batches
from ipu_dynamo.testing.reference import named_tensors

ENGINES = [
    pytest.param("eager"),
    pytest.param("inductor", marks=pytest.mark.inductor),
]
# Of properties that compile several programs for an example: fewer in `make test`.
ENGINES_OF_SEVERAL = [
    pytest.param("eager", marks=pytest.mark.quick(8)),
    pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.quick(2)]),
]
# Of properties of passes that no engine sees: compiled in `make test-all` alone.
_COMPILED_LATER = pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])
EAGER_FIRST = [ENGINES[0], _COMPILED_LATER]
EAGER_FIRST_OF_SEVERAL = [ENGINES_OF_SEVERAL[0], _COMPILED_LATER]


def draw_placement(data, recipe):
    """A placement that the compiler accepts for `recipe`."""
    kinds = ["sharded", "serial_phased", "parallel_phased"]
    kinds += [] if recipe.shares_buffers else ["pipelined"]
    return data.draw(placements_of(recipe.build().names, kinds=kinds))


def draw_placed(data, recipe, *, training):
    """A model of `recipe` in a drawn placement, with options for it."""
    model, placement = recipe.build(), draw_placement(data, recipe)
    placement.place(model)
    micro_batches = placement.micro_batches(training=training)
    return model, Options(
        strategy=placement.strategy,
        gradient_accumulation=micro_batches,
        device_iterations=micro_batches,
        recompute=data.draw(st.sampled_from(["auto", "all"])),
    )


def slow(model):
    """An optimiser whose first momentum is the gradient; slow, since drawn models may diverge."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def halves(model):
    """An optimiser that keeps small integers exact for one update."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def calls(recipe, options, *, training=True, count=2):
    """The arguments of `count` calls."""
    rows = micro_batches(options, training=training)
    return [recipe.data(rows, seed=call) for call in range(count)]


def loss_of(returned):
    """The value that drawn models train."""
    return returned["loss"]


def plain(recipe, options, *, training=True):
    """All that calls leave behind in plain PyTorch."""
    model = recipe.build()
    optimizer = slow(model) if training else None
    reference = Reference(model, options, optimizer, loss_of)
    left = []
    for args in copy.deepcopy(calls(recipe, options, training=training)):
        left += [reference(*args), args, copy.deepcopy(named_tensors(model))]
        states = optimizer.state.values() if training else ()
        left += [copy.deepcopy(dict(state)) for state in states]
    return left


def train(recipe, placement, options, *, optimizer=slow, **settings):
    """Assert that training agrees with plain PyTorch; return the trained program's owner."""
    recipe = with_enough_digits(recipe, lambda one: plain(one, options))
    model, data = placement.place(recipe.build()), calls(recipe, options)
    settings = {"loss": loss_of, "optimizer": optimizer, **settings}
    return assert_same_training(model, data, options, **settings)


def infer(recipe, placement, options, **settings):
    """Assert that inference agrees with plain PyTorch."""
    recipe = with_enough_digits(recipe, lambda one: plain(one, options, training=False))
    model, data = placement.place(recipe.build()), calls(recipe, options, training=False)
    return assert_same_inference(model, data, options, **settings)


def outcome(recipe, placement, options, *, training=True, count=2):
    """All that calls of a program leave behind; of one call, if it trains with integers.

    It holds what was returned, changed inputs, weights, buffers, and the optimiser's state,
    whose momentum after the first call is the gradient.
    """
    model = placement.place(recipe.build())
    optimizer = halves(model) if recipe.exact else slow(model)
    if training:
        program = compile_training(model, optimizer, options)
    else:
        program = compile_inference(model, options)
    count = 1 if recipe.exact and training else count
    given = calls(recipe, options, training=training, count=count)
    returned = [program(*arguments) for arguments in given]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if training:
        program.read_optimizer_state()
    states = [dict(state) for state in optimizer.state.values()]
    return {"returned": returned, "given": given, "tensors": tensors, "states": states}
