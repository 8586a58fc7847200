"""Check the schedules of drawn programs: they parse, and each of their actions is needed."""

from dataclasses import replace

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import CompileError, compile_inference, compile_training
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.execute.bound_form import schedule_here
from ipu_dynamo.testing import options_for, recipes
from ipu_dynamo.testing.batchings import micro_batches
from tests.properties.running import draw_placement, slow


def compiled(data, recipe, *, training):
    """The executable of a drawn model, with a drawn placement and drawn options."""
    placement = draw_placement(data, recipe)
    if placement.strategy.kind == "pipelined" and data.draw(st.booleans()):
        strategy = replace(placement.strategy, schedule="zero_bubble")
        placement = replace(placement, strategy=strategy)
    options = data.draw(options_for(engine="eager", placement=placement))
    model = placement.place(recipe.build())
    if training:
        program = compile_training(model, slow(model), options)
    else:
        program = compile_inference(model, options)
    program.compile(*recipe.data(micro_batches(options, training=training)))
    return program.executable


@pytest.mark.quick(8)
@given(recipe=recipes(), data=st.data(), training=st.booleans())
def test_a_schedule_parses_and_every_action_is_needed(recipe, data, training):
    executable = compiled(data, recipe, training=training)
    host = executable.host_program
    for workers in (None, 1, 2, 3):
        schedule = schedule_here(host.inlined, host, workers)
        note(str(schedule))
        for one in (schedule, schedule.timed()):
            assert Schedule.parse(str(one)) == one
            one.check(host.inlined)
        assert Schedule.parse(str(schedule)).grid() == schedule.grid()
        worker = data.draw(st.integers(0, len(schedule.workers) - 1))
        actions = list(schedule.workers[worker])
        actions.pop(data.draw(st.integers(0, len(actions) - 1)))
        others = [*schedule.workers]
        others[worker] = tuple(actions)
        with pytest.raises(CompileError):
            replace(schedule, workers=tuple(others)).check(host.inlined)
    adds = host.deferred is not None
    executable.schedule.check(host.runs, adds=adds)
    assert Schedule.parse(str(executable.schedule)) == executable.schedule
