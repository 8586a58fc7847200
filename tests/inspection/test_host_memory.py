"""Check the memory of this computer against the storages that PyTorch allocates in a step."""

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    InputError,
    Location,
    Locations,
    Options,
    compile_inference,
    compile_training,
    inspect,
)
from ipu_dynamo.runtime.engines.check import checked_stage, checks
from ipu_dynamo.runtime.engines.check.checks import Checks
from ipu_dynamo.runtime.engines.check.judge import Failure, Verdict
from tests.inspection.counted_storages import counted, followed, measured
from tests.inspection.looking import EAGER, Chain, nothing_changes, pipeline

X = torch.arange(96.0).reshape(12, 8) / 96


@pytest.mark.parametrize("options", [{}, {"recompute_here": False}, {"device_iterations": 2}])
def test_live_bytes_of_a_pipeline_are_those_of_storages(options):
    with counted() as counter:
        step = pipeline(workers=1, **options)
        live = measured(step, counter, X.repeat(options.get("device_iterations", 1), 1))
    memory = inspect(step).program.host.memory
    assert len(memory.steps) > 100
    assert live[: len(memory.steps)] == followed(memory)


def test_categories_and_the_peak(monkeypatch):
    step = pipeline(workers=1)
    step(X)
    with nothing_changes(monkeypatch, step.model):
        memory = inspect(step).program.host.memory
        text, picture = str(memory), memory.svg()
    assert memory.stages == (0, 1, 2)
    own = [v for v in step.program.variables if v.ipu == 1]
    weights = sum(v.held.nbytes for v in own if v.kind == "parameter")
    for stage in memory.stages:
        assert all(at["weights"] == at["accumulators"] == weights for at in memory.curve(stage))
    # the loss is of the last stage; each keeps its input, or has none to keep
    stash = [max(at["stash and stream buffers"] for at in memory.curve(s)) for s in (0, 1)]
    assert stash == [X.nbytes + 64, 64]  # the batch, and what forward leaves to backward
    every = [sum(at.values()) for at in memory.curve()]
    assert every[memory.peak()] == max(every) == memory.peak_bytes()
    assert sum(value.nbytes for value in memory.held(memory.peak())) == max(every) - sum(
        v.held.nbytes for v in step.program.variables
    )
    by_stage = [[sum(at.values()) for at in memory.curve(stage)] for stage in memory.stages]
    assert every == [sum(of) for of in zip(*by_stage, strict=True)]
    assert "looking.py:" in text.partition("peak of all")[2]
    assert "%x" in text
    assert picture.count("<polygon") == 6 * 3
    assert "stage 2, this computer: peak" in picture
    counters = memory.counters()
    assert [sum(at.values()) for at in counters["stage 1, this computer"]] == by_stage[1]


def test_a_comparison_shows_what_recomputation_saves():
    kept, repeated = (pipeline(workers=1, recompute=how) for how in ("off", "all"))
    for step in (kept, repeated):
        step(X)
    text = inspect(kept).compare(inspect(repeated))
    assert text.startswith("memory at the peak, this computer: training step of Chain -> ")
    assert "stage 0: " in text
    assert inspect(kept).compare(inspect(kept)).count("%") == 0


def test_what_is_not_followed_has_a_reason():
    model = nn.Linear(4, 1)
    step = compile_training(
        nn.Sequential(model, nn.Flatten(0)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Options(**EAGER),
    )
    with pytest.raises(InputError, match="is not known: not compiled yet"):
        inspect(step).compare(inspect(step))
    off_chip = Locations(weights=Location(off_chip=True, min_elements=0))
    inference = compile_inference(model, Options(**EAGER, locations=off_chip))
    inference(torch.ones(2, 4))
    host = inspect(inference).program.host
    assert host.memory is None
    assert host.absent["memory"] == "it gathers or loads variables"


def test_micro_batches_that_begin_anywhere_are_copied_and_counted():
    """Rows of three numbers: one in sixteen begins at a multiple of 64 bytes."""
    x = torch.randn(20, 3)
    with counted() as counter:
        step = compile_inference(nn.Linear(3, 2), Options(**EAGER, device_iterations=20))
        live = measured(step, counter, x)
    memory = inspect(step).program.host.memory
    assert live == followed(memory)
    streams = [sum(s.nbytes for s in memory.storages if s.category and s.name == "input")]
    assert streams == [x.nbytes + 18 * 12]


class Wide(Chain):
    def forward(self, x):
        wide = torch.exp(self.layers[0](x)).repeat(1, 64)
        scale = wide.sum()  # all of it, before an element is divided by it
        return nn.functional.mse_loss((wide / scale).mm(wide.t() + scale), x @ x.t())


@pytest.mark.inductor
def test_of_machine_code_steps_are_what_it_allocates():
    step = compile_inference(Wide(), Options(workers=1, engine="inductor"))
    step(X)
    memory = inspect(step).program.host.memory
    assert {step.operator for step in memory.steps} == {""}
    assert len(memory.steps) > len(step.program.calls)
    assert "inside @" in str(memory)
    most = max(at.get("temporaries", 0) for at in memory.curve())
    assert 12 * 64 * 8 * 4 <= most <= 4 * 12 * 64 * 8 * 4


@pytest.mark.inductor
@pytest.mark.parametrize("found", ["now", "before"])
def test_a_function_that_fails_its_check_is_followed_operator_by_operator(found, monkeypatch):
    monkeypatch.setattr(checks, "_keep", lambda *_: None)
    wrong = Verdict([Failure(0, "it is wrong")])
    monkeypatch.setattr(checked_stage, "judge", lambda *_: wrong)
    outcome = "failed it is wrong" if found == "before" else ""
    monkeypatch.setattr(Checks, "_outcome", lambda *_: outcome)
    model = Wide()
    memories = []
    for engine in ("inductor", "eager"):
        step = compile_inference(model, Options(workers=1, engine=engine))
        step(X)
        memories.append(inspect(step).program.host.memory)
    assert all(step.operator for step in memories[0].steps)
    assert memories[0].curve() == memories[1].curve()


class Fitted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return nn.functional.mse_loss(self.layers(x), x)


def test_a_step_that_is_fused_again_is_followed_as_it_runs():
    model = Fitted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = Options(engine="inductor", force={"FuseStep": True, "ReplaySteps": False})
    step = compile_training(model, optimizer, options)
    step(X)
    host = inspect(step).program.host
    assert host.program.fused is not None
    assert host.memory.peak_bytes() > 0
    optimizer.param_groups[0]["momentum"] = 0.0  # the step is fused for other zeros
    step(X)
    assert inspect(step).program.host.memory.peak_bytes() > 0
