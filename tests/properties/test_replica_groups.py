"""Check that drawn models, with weights that groups of replicas have for themselves, do what plain
PyTorch does with each group's slices."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import ReplicaGroups
from ipu_dynamo.testing import (
    assert_same_inference,
    assert_same_training,
    options_for,
    recipes,
    with_enough_digits,
)
from ipu_dynamo.testing.kinds import KINDS
from tests.properties.running import EAGER_FIRST, calls, draw_placement, loss_of, plain, slow

PLAIN = KINDS.keys() - {"lstm"}  # it keeps a second list of its weights


def draw_groups(data, model, replicas):
    """Groups for some parameters of `model`, which get a slice for each group."""
    sizes = st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0])
    names = st.sampled_from([name for name, _ in model.named_parameters()])
    groups = st.builds(ReplicaGroups, sizes, st.booleans())
    drawn = data.draw(st.dictionaries(names, groups, min_size=1, max_size=4))
    for name, of in drawn.items():
        whole = model.get_parameter(name)
        slices = [whole.detach() * (1 + group / 4) for group in range(of.count(replicas))]
        grouped = nn.Parameter(torch.stack(slices), whole.requires_grad)
        for module in model.modules():
            for key, tensor in module._parameters.items():
                if tensor is whole:
                    module._parameters[key] = grouped
    return drawn


@pytest.mark.parametrize("engine", EAGER_FIRST)
@given(recipe=recipes(kinds=PLAIN), training=st.booleans(), data=st.data())
def test_groups_agree_with_pytorch(engine, recipe, training, data):
    placement = draw_placement(data, recipe)
    options = data.draw(
        options_for(engine=engine, placement=placement, training=training, max_replicas=4)
    )
    assume(options.replicas > 1)
    recipe = with_enough_digits(recipe, lambda one: plain(one, options, training=training))
    model = placement.place(recipe.build())
    options = replace(options, replica_groups=draw_groups(data, model, options.replicas))
    given = calls(recipe, options, training=training)
    if training:
        program = assert_same_training(model, given, options, optimizer=slow, loss=loss_of).program
    else:
        program = assert_same_inference(model, given, options).program
    note(program.short())
