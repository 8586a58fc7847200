"""Compare the memory of drawn programs with the storages that PyTorch allocates."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from ipu_dynamo import CompileError, Locations, compile_inference, compile_training, inspect
from ipu_dynamo.testing import options_for, recipes
from ipu_dynamo.testing.batchings import micro_batches
from ipu_dynamo.testing.placements import BlockPlacement
from tests.inspection.counted_storages import counted, followed, measured
from tests.properties.running import draw_placement

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),  # traced
}
FORMS = ({}, {"FuseStep": True}, {"FuseStep": False, "DeferAccumulation": True})


@pytest.mark.examples(100)
@pytest.mark.quick(6)
@given(data=st.data())
def test_live_bytes_of_drawn_programs_are_those_of_storages(data):
    training = data.draw(st.sampled_from([True, True, False]))
    forced = data.draw(st.sampled_from(FORMS)) if training else {}
    dtypes = [torch.float32] if forced else [torch.float32, torch.float64]
    recipe = data.draw(recipes(random=True, training=training, dtypes=dtypes))
    placement = BlockPlacement() if forced else draw_placement(data, recipe)
    options = replace(
        data.draw(options_for(training=training, placement=placement)),
        workers=1,
        recompute=data.draw(st.sampled_from(["auto", "all"])),
    )
    if forced:
        only = {"gradient_accumulation": 1} if "DeferAccumulation" not in forced else {}
        only |= {"replicas": 1, "input_group_size": 1, "locations": Locations()}
        options = replace(options, force=forced, **only)
    model, inputs = placement.place(recipe.build()), recipe.data(
        micro_batches(options, training=training)
    )  # fmt: skip
    with counted() as counter:
        if training:
            optimizer = data.draw(st.sampled_from([*OPTIMIZERS.values()]))
            step = compile_training(model, optimizer(model.parameters()), options)
        else:
            step = compile_inference(model, options)
        try:
            live = measured(step, counter, *inputs)
        except CompileError as error:
            assume("cannot be one function" not in str(error))
            assume("cannot run side by side" not in str(error))
            raise
    host = inspect(step).program.host
    form = "fused" if host.program.fused else "deferred" if host.program.deferred else "loop"
    if host.memory is None:
        event(f"not followed: {host.absent['memory']}")
        return
    kind = "training" if training else "inference"
    event(f"{kind}, {form}, {options.strategy.kind}, {min(options.replicas, 2)} replicas")
    expected = followed(host.memory)
    assert live[: len(expected)] == expected
    steps = 1 if not training else options.device_iterations
    assert len(live) * min(steps, 2 if form == "fused" else 1) == len(expected) * steps
