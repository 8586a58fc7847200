"""Check that code which Inductor compiles rightly passes: drawn programs give no alarm."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import ipu_dynamo.whole_step.lowering as lowering
from ipu_dynamo import IpuError, Options, compile_training
from ipu_dynamo.runtime.engines.check import checks as module
from ipu_dynamo.testing import recipes
from ipu_dynamo.tune.artifact_store import CACHE_DIR
from tests.runtime.engines.check.cancelling_models import Drawn

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Outcomes:
    """The outcomes of the checks of programs, counted, and the alarms in words."""

    def __init__(self, monkeypatch, folder):
        self.states, self.alarms = Counter(), []
        self._engines, make = [], lowering.make_engine

        def kept(*args, **options):
            self._engines.append(make(*args, **options))
            return self._engines[-1]

        monkeypatch.setattr(lowering, "make_engine", kept)
        monkeypatch.setenv(CACHE_DIR, str(folder))
        module.forget()

    def run(self, recipe, fused):
        """Train a model for two steps."""
        self._engines.clear()
        self.states["programs"] += 1
        model = recipe.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        try:
            step = compile_training(
                model, optimizer, Options("inductor", force={"FuseStep": fused})
            )
            for _ in range(2):  # what holds one value at first is compared once more
                step(*recipe.data(1))
        except IpuError:  # a model that cannot be fused
            self.states["refused"] += 1
            return
        for stage in self._engines[-1].checks.stages:
            self.states[stage.state] += 1
            if stage.state == "failed":
                words = f"{recipe}, fused={fused}: {stage.problem}; N / M {stage.spreads}"
                self.alarms.append(words)


@pytest.mark.slow
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_programs_give_no_alarm(dtype, tmp_path, monkeypatch):
    outcomes = Outcomes(monkeypatch, tmp_path)

    @seed(1)
    @settings(
        max_examples=250,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=recipes(random=True, dtypes=[dtype]), fused=st.booleans())
    def run(recipe, fused):
        outcomes.run(recipe, fused and recipe.dtype == torch.float32)  # others are not fused

    run()
    assert not outcomes.alarms, outcomes.states


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_gradients_that_are_all_rounding_give_no_alarm(tmp_path, monkeypatch):
    outcomes = Outcomes(monkeypatch, tmp_path)
    for number in range(30):
        outcomes.run(Drawn(number), fused=number % 3 == 0)
    assert not outcomes.alarms, outcomes.states
    assert outcomes.states["passed"] == outcomes.states["programs"]
