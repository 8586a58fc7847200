"""Check on random models that recording changes no bit, and that each trace is a right one."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import ipu_dynamo
from ipu_dynamo.program import Copy, Load, Store
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.testing import assert_same_bits, options_for, placements_of, recipes
from tests.profiling.strict_reader import read_trace
from tests.ranks.test_any_mesh import CALLS, OPTIMIZERS, Case


@st.composite
def cases(draw):
    """A model, its placement and options, and how it is trained or not."""
    training = draw(st.booleans())
    recipe = draw(recipes(random=True, training=training, max_steps=4))
    placement = draw(placements_of(recipe.build().names))
    options = draw(options_for(training=training, placement=placement))
    options = replace(options, seed=draw(st.integers(0, 9)), workers=draw(st.sampled_from([1, 2])))
    return Case(recipe, placement, options, 1, 1, training, draw(st.sampled_from(OPTIMIZERS)))


@pytest.mark.quick(3)
@given(cases())
def test_recorded_programs_have_the_bits_of_others(case):
    plain = case.run()
    with TemporaryDirectory() as folder:
        with ipu_dynamo.profile(Path(folder, "trace.json")):
            ours = case.run()
        trace = read_trace(Path(folder, "trace.json"))
    for what in ("returned", "given", "tensors"):
        assert_same_bits(ours[what], plain[what], what)
    program, executable = ours["program"], ours["program"].executable
    assert len(trace.of("call")) == CALLS
    if executable.fused:
        return
    cut, steps = sections(executable.host_program.runs), len(trace.of("step"))
    runs = steps * cut.micro_batches * program.program.replicas
    event(f"{program.options.strategy.kind}, {program.program.kind}")
    tasks = [span for span in trace.of("stage pass") if "adds" not in span["name"]]
    assert len(tasks) == steps * sum(map(len, executable.schedule.runs))
    expected = Counter(
        category
        for instruction in cut.loop
        for kind, category in ((Copy, "copy"), (Store | Load, "off chip"))
        if isinstance(instruction, kind)
    )
    for category, count in expected.items():
        of = [span for span in trace.of(category) if "micro_batch" in span["args"]]
        assert len(of) == runs * count
        assert all(span["args"]["bytes"] >= 0 for span in of)
    held = [one["args"].get("values", 0) for one in trace.counters]
    assert max(held, default=0) >= 0
    assert torch.is_grad_enabled()
