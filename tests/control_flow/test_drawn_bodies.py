"""Check that drawn loops and branches compute what plain Python does, and its gradients."""

import copy

import pytest
import torch
from hypothesis import currently_in_test_context, given, note
from hypothesis import strategies as st

from ipu_dynamo import Options, compile_inference, compile_training
from tests.control_flow.drawn_bodies import (
    FORMS,
    OPERATORS,
    ROWS,
    TRAINED,
    WIDTH,
    Drawn,
    Form,
    every,
    forms,
)


def _inputs(seed, parts=1):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS * parts, WIDTH, generator=rng) + (seed % 3 - 1)


def _assert_close(values, expected):
    for one, other in zip(values, expected, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * scale)


# In `make test` Inductor has few of them: it meets all kinds in test_loops_in_programs.py.
ENGINES = [
    pytest.param("eager", marks=pytest.mark.quick(4)),
    pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.quick(2)]),
]


@pytest.mark.parametrize("engine", ENGINES)
@given(drawn=st.lists(forms(kinds=FORMS), min_size=1, max_size=2))
def test_values_are_those_of_python(engine, drawn):
    assert_values(engine, drawn)


@pytest.mark.parametrize("engine", ENGINES)
@given(drawn=st.lists(forms(kinds=TRAINED), min_size=1, max_size=2), stages=st.sampled_from([1, 2]))
def test_gradients_are_those_of_python(engine, drawn, stages):
    assert_gradients(engine, drawn, stages)


@pytest.mark.parametrize("kinds", [FORMS, TRAINED], ids=["values", "gradients"])
def test_all_kinds_and_operators_are_those_of_python(kinds):
    drawn = every(kinds)
    steps = [step.what for form in drawn for body in form.bodies for step in body]
    assert {form.kind for form in drawn} == set(kinds)
    assert {what for what in steps if isinstance(what, str)} == set(OPERATORS)
    assert any(isinstance(what, Form) for what in steps)
    if kinds is FORMS:
        assert_values("eager", drawn)
    else:
        assert_gradients("eager", drawn, stages=2)


def assert_values(engine, drawn):
    model = Drawn(drawn)
    other = copy.deepcopy(model)
    other.plain = True
    run = compile_inference(model, Options(engine=engine))
    with torch.no_grad():
        for seed in range(3):
            x = _inputs(seed)
            _assert_close([run(x)], [other(x)])
    _note(run)


def assert_gradients(engine, drawn, stages):
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
    _note(step)


def _note(run):
    if currently_in_test_context():
        note(str(run.program))
