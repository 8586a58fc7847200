"""Check that passes are entered where they have work, and hardly anywhere else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo.capture.trace import trace
from ipu_dynamo.passes import pipeline
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.testing import recipes
from ipu_dynamo.tune.figures import Figures
from tests.passes.docstring_examples import examples
from tests.passes.example_graphs import ExampleGraph
from tests.passes.example_text import letters
from tests.properties.evaluate import read_arguments
from tests.properties.running import draw_placed

MACHINE = Machine("inductor", own_tensors=True, figures=Figures("onednn"))


@contextmanager
def entering() -> Iterator[set[str]]:
    """Enter passes that do not apply, too: they must change nothing. Gives their names."""
    run, idle = PassManager._run, set[str]()

    def entered(self: PassManager, step: Pass, model):
        if not step.applies(model, self.contents):
            idle.add(step.name)
            text = write_level(model)
            result = step(model)
            assert result is False or result is model, f"{step.name} does not apply, and has work"
            assert write_level(model) == text, step.name
        return run(self, step, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassManager, "_run", entered)
        yield idle


@pytest.mark.quick(4)
@given(recipe=recipes(), training=st.booleans(), data=st.data())
def test_a_pass_that_is_not_entered_has_no_work_in_a_whole_step(recipe, training, data):
    recipe = replace(recipe, dtype=data.draw(st.sampled_from([torch.float32, torch.float16])))
    model, options = draw_placed(data, recipe, training=training)
    options = replace(
        options,
        narrow=data.draw(st.booleans()),
        partials=data.draw(st.sampled_from(["float", "half"])),
        stochastic_rounding=data.draw(st.booleans()),
        stable_norm=data.draw(st.booleans()),
        floating_point_exceptions=data.draw(st.booleans()),
    )
    capture = trace(model, read_arguments(model, recipe.data(1), {}), training=training)
    manager = PassManager("drawn")
    with entering() as idle:
        program = pipeline.lower(capture, pipeline.whole_step(options, training=training), manager)
        pipeline.run_host_passes(program, pipeline.host_passes(options, MACHINE), manager)
    assert idle


@pytest.mark.quick(3)
@given(recipe=recipes(), training=st.booleans())
def test_a_pass_that_is_not_entered_has_no_work_through_torch_compile(recipe, training):
    torch._dynamo.reset()
    model, options = recipe.build().train(training), {"engine": "eager"}
    with entering() as idle, torch.set_grad_enabled(training):
        loss = torch.compile(model, backend="ipu", options=options)(*recipe.data(1))["loss"]
        if training:
            loss.sum().backward()
    assert idle


PASSES = [step for step in pipeline.all_passes() if step.level in ("traced", "joint")]


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.name)
def test_a_pass_that_is_not_entered_has_no_work_in_examples(step):
    module = sys.modules[type(step).__module__]
    for example in examples(module.__doc__):
        graph = ExampleGraph(step.level, vars(module), letters(example.before + example.after))
        graph.read(example.before)
        model = graph.model()
        text, contents = write_level(model), Contents.of(model)
        idle = [one for one in PASSES if not one.applies(model, contents)]
        for one in (one for one in idle if one.level == step.level):
            with suppress(KeyError):  # the example lacks what earlier passes leave
                assert one(model) in (False, model), f"{one.name} does not apply, and has work"
            assert write_level(model) == text, one.name


def test_a_pass_that_does_not_apply_is_not_entered():
    class Never(Pass):
        level = "joint"

        def applies(self, capture, contents):
            return False

        def __call__(self, capture):
            raise RuntimeError("entered")

    example = next(examples(RELU))
    graph = ExampleGraph("joint", {}, letters(example.before))
    graph.read(example.before)
    manager = PassManager("graph")
    manager.run([Never()], graph.model())
    (run,) = manager.runs
    assert not run.changed
    assert str(run) == "Never: does not apply"
    assert manager.done == {"Never"}


RELU = """
Before   %y = aten.relu(%x: f32[n])
After    the same
"""


def test_two_layers_enter_few_passes_in_vain_and_make_the_list_of_passes_once():
    torch._dynamo.reset()
    pipeline.all_passes.cache_clear()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    explained = ipu_dynamo.explain(model, torch.ones(2, 8), options={"engine": "eager"})
    runs = [run for graph in explained.graphs for _, runs in graph.passes for run in runs]
    assert len(runs) > 80
    assert sum(run.entered and not run.changed for run in runs) <= 20
    assert pipeline.all_passes.cache_info().misses == 1
