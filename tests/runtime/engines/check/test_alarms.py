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

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def states_and_alarms(dtype, examples):
    """Count the outcomes of the checks of drawn programs, and describe each alarm."""
    states, alarms, engines = Counter(), [], []
    make = lowering.make_engine

    def kept(*args, **options):
        engines.append(make(*args, **options))
        return engines[-1]

    @seed(1)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=recipes(random=True, dtypes=[dtype]), fused=st.booleans())
    def run(recipe, fused):
        engines.clear()
        fused &= recipe.dtype == torch.float32  # steps of other types are not fused
        states["programs"] += 1
        model = recipe.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        try:
            step = compile_training(
                model, optimizer, Options("inductor", force={"FuseStep": fused})
            )
            for _ in range(2):  # what holds one value at first is compared once more
                step(*recipe.data(1))
        except IpuError:  # a model that cannot be fused
            states["refused"] += 1
            return
        for stage in engines[-1].checks.stages:
            states[stage.state] += 1
            if stage.state == "failed":
                alarms.append(f"{recipe}, fused={fused}: {stage.problem}; N / M {stage.spreads}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "make_engine", kept)
        run()
    return states, alarms


@pytest.mark.slow
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_programs_give_no_alarm(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    module.forget()
    states, alarms = states_and_alarms(dtype, 250)
    assert not alarms, states
