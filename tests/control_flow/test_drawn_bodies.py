"""Check that drawn loops and branches compute what plain Python does, and its gradients."""

import copy

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import Options, compile_inference, compile_training
from tests.control_flow.drawn_bodies import FORMS, ROWS, TRAINED, WIDTH, Drawn, forms
from tests.properties.running import ENGINES


def _inputs(seed, parts=1):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS * parts, WIDTH, generator=rng) + (seed % 3 - 1)


def _assert_close(values, expected):
    for one, other in zip(values, expected, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("engine", ENGINES)
@given(drawn=st.lists(forms(kinds=FORMS), min_size=1, max_size=2))
def test_values_are_those_of_python(engine, drawn):
    model = Drawn(drawn)
    other = copy.deepcopy(model)
    other.plain = True
    run = compile_inference(model, Options(engine=engine))
    with torch.no_grad():
        for seed in range(3):
            x = _inputs(seed)
            _assert_close([run(x)], [other(x)])
    note(str(run.program))


@pytest.mark.parametrize("engine", ENGINES)
@given(drawn=st.lists(forms(kinds=TRAINED), min_size=1, max_size=2), stages=st.sampled_from([1, 2]))
def test_gradients_are_those_of_python(engine, drawn, stages):
    model = Drawn(drawn, stages=stages, trained=True)
    other = copy.deepcopy(model)
    other.plain = True
    options = Options(engine=engine, gradient_accumulation=2)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.05), options)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    for seed in range(2):
        x = _inputs(seed, parts=2)
        returned = step(x)
        optimizer.zero_grad()
        losses = [other(part) for part in x.split(ROWS)]
        (sum(losses) / 2).backward()
        optimizer.step()
        _assert_close([returned.flatten()[-1]], [losses[-1].detach()])
        _assert_close(model.state_dict().values(), other.state_dict().values())
    note(str(step.program))
