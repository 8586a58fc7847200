"""Check the translation of torch's optimisers to rules, and of their state from and to torch."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.errors import CompileError, InputError
from ipu_dynamo.program.ir.update_rules import SGD, Adam, RMSprop
from ipu_dynamo.runtime.update.parameter_update import ParameterUpdate
from ipu_dynamo.runtime.update.update_tensors import new_states
from ipu_dynamo.whole_step.optimizer.torch_optimizers import (
    Group,
    describe,
    export_state,
    import_state,
    refresh,
)


def small_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 4), "a.bias": (4,), "b": ()}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=rng).to(dtype))
        for name, shape in shapes.items()
    }


def gradients_at(step: int, parameters) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=rng).to(p.dtype) for name, p in parameters.items()}


def torch_steps(optimizer, parameters, steps) -> None:
    for step in steps:
        for name, gradient in gradients_at(step, parameters).items():
            parameters[name].grad = gradient
        optimizer.step()


def core_steps(groups, parameters, states, steps):
    """Step the groups' parameters from `states`; return the states, in the same form."""
    held = {}
    for group in groups:
        tensors = [parameters[name] for name in group.parameters]
        own = new_states(group.rule, tensors)
        for name, place in zip(group.parameters, range(len(tensors)), strict=True):
            for state, value in states.get(name, {}).items():
                own[state][place].copy_(value)
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        update = ParameterUpdate(group.rule, tensors, gradients, own)
        for step in steps:
            new = gradients_at(step, parameters)
            for name, gradient in zip(group.parameters, gradients, strict=True):
                gradient.copy_(new[name])
            update(group.values)
        for place, name in enumerate(group.parameters):
            held[name] = {state: tensors[place] for state, tensors in own.items()}
    return held


# --- Describing ----------------------------------------------------------------------------------


@given(
    lr=st.floats(0, 1),
    momentum=st.sampled_from((0.0, 0.9)),
    dampening=st.floats(0, 1),
    decay=st.floats(0, 1),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_reads_sgd(lr, momentum, dampening, decay, flags):
    nesterov, maximize = flags
    if nesterov := nesterov and momentum > 0:
        dampening = 0.0
    parameters = small_model()
    optimizer = torch.optim.SGD(
        parameters.values(), lr, momentum, dampening, decay, nesterov, maximize=maximize
    )
    rule = SGD(momentum=momentum > 0, nesterov=nesterov, maximize=maximize)
    values = (lr, momentum, dampening, decay)
    assert describe(optimizer, parameters) == (Group(rule, tuple(parameters), values),)


@pytest.mark.parametrize(
    ("make", "rule", "values"),
    [
        (torch.optim.Adam, Adam(), (1e-3, 0.9, 0.999, 1e-8, 0.0)),
        (torch.optim.AdamW, Adam(decoupled_weight_decay=True), (1e-3, 0.9, 0.999, 1e-8, 1e-2)),
        (
            lambda p: torch.optim.Adam(p, decoupled_weight_decay=True, weight_decay=0.5),
            Adam(decoupled_weight_decay=True),
            (1e-3, 0.9, 0.999, 1e-8, 0.5),
        ),
        (
            lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True, betas=(0.0, 0.5)),
            Adam(decoupled_weight_decay=True, amsgrad=True, maximize=True),
            (1e-3, 0.0, 0.5, 1e-8, 1e-2),
        ),
        (torch.optim.RMSprop, RMSprop(), (1e-2, 0.99, 1e-8, 0.0, 0.0)),
        (
            lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5, maximize=True),
            RMSprop(centered=True, momentum=True, maximize=True),
            (1e-2, 0.99, 1e-8, 0.0, 0.5),
        ),
    ],
)
def test_reads_adaptive_optimizers(make, rule, values):
    parameters = small_model()
    (group,) = describe(make(parameters.values()), parameters)
    assert group == Group(rule, tuple(parameters), values)


def test_reads_groups_with_numbers_of_their_own():
    parameters = small_model()
    optimizer = torch.optim.SGD(
        [
            {"params": [parameters["b"]], "lr": 0.5},
            {"params": [parameters["a.bias"], parameters["a.weight"]], "momentum": 0.9},
        ],
        lr=0.1,
    )
    assert describe(optimizer, parameters) == (
        Group(SGD(), ("b",), (0.5, 0.0, 0.0, 0.0)),
        Group(SGD(momentum=True), ("a.bias", "a.weight"), (0.1, 0.9, 0.0, 0.0)),
    )


def test_how_torch_computes_a_step_makes_no_difference():
    parameters = small_model()
    plain = describe(torch.optim.Adam(parameters.values()), parameters)
    for option in ("foreach", "fused", "capturable"):
        other = torch.optim.Adam(parameters.values(), **{option: True})
        assert describe(other, parameters) == plain


def test_reads_a_learning_rate_that_is_a_tensor():
    parameters = small_model()
    optimizer = torch.optim.Adam(parameters.values(), lr=torch.tensor(0.25))
    assert describe(optimizer, parameters)[0].values[0] == 0.25


def test_leaves_out_frozen_parameters_and_takes_the_first_of_two_names():
    parameters = small_model()
    parameters["a.bias"].requires_grad_(False)
    optimizer = torch.optim.SGD(parameters.values(), 0.1)
    (group,) = describe(optimizer, {**parameters, "tied": parameters["b"]})
    assert group.parameters == ("a.weight", "b")


class OwnSGD(torch.optim.SGD):
    """A subclass whose step may do anything."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.Adagrad(p), "no update rule for the optimizer torch.optim.Adagrad"),
        (lambda p: OwnSGD(p, 0.1), "may change what torch.optim.SGD computes"),
        (lambda p: torch.optim.SGD(p, 0.1, differentiable=True), "asks for a differentiable step"),
        (
            lambda p: torch.optim.SGD(p, torch.tensor(0.1, requires_grad=True)),
            "lr of the optimizer's group 0 is not a number",
        ),
    ],
)
def test_refuses_optimizers_without_a_rule(make, said):
    parameters = small_model()
    with pytest.raises(CompileError, match=said) as error:
        describe(make(list(parameters.values())), parameters)
    assert "try:" in str(error.value)


def test_a_subclass_can_be_treated_as_its_base():
    parameters = small_model()
    optimizer = OwnSGD(parameters.values(), 0.1)
    (group,) = describe(optimizer, parameters, treat_as=torch.optim.SGD)
    assert group.rule == SGD()
    with pytest.raises(CompileError, match=r"may change what torch\.optim\.SGD"):
        describe(optimizer, parameters, treat_as=torch.optim.Adam)


def test_refuses_step_hooks():
    parameters = small_model()
    optimizer = torch.optim.SGD(parameters.values(), 0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(CompileError, match="has step hooks"):
        describe(optimizer, parameters)
    handle.remove()
    assert describe(optimizer, parameters)


def test_refuses_parameters_of_another_model():
    parameters = small_model()
    optimizer = torch.optim.SGD(small_model().values(), 0.1)
    with pytest.raises(CompileError, match=r"parameter 0 of the optimizer's group 0.*\[3, 4\]"):
        describe(optimizer, parameters)


def test_refuses_complex_parameters():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(CompileError, match="w, is complex64"):
        describe(torch.optim.SGD([weight], 0.1), {"w": weight})


# --- Refreshing ----------------------------------------------------------------------------------


def test_refresh_reads_new_numbers_from_the_same_or_another_optimizer():
    parameters = small_model()
    optimizer = torch.optim.AdamW(parameters.values())
    groups = describe(optimizer, parameters)
    optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2), initial_lr=1.0)
    expected = (0.5, 0.1, 0.2, 1e-8, 1e-2)
    assert refresh(groups, optimizer, parameters) == (
        Group(groups[0].rule, groups[0].parameters, expected),
    )
    other = torch.optim.AdamW(reversed(parameters.values()), lr=0.25)
    (group,) = refresh(groups, other, parameters)
    assert group.parameters == groups[0].parameters
    assert group.values[0] == 0.25


def test_refresh_follows_a_scheduler():
    parameters = small_model()
    optimizer = torch.optim.SGD(parameters.values(), 1.0)
    groups = describe(optimizer, parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert refresh(groups, optimizer, parameters)[0].values[0] == 0.5


def test_refresh_keeps_a_momentum_that_becomes_zero():
    parameters = small_model()
    optimizer = torch.optim.SGD(parameters.values(), 0.1, 0.9, nesterov=True)
    groups = describe(optimizer, parameters)
    optimizer.param_groups[0]["momentum"] = 0.0
    (group,) = refresh(groups, optimizer, parameters)
    assert group.rule == SGD(momentum=True, nesterov=True)
    assert group.values == (0.1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: torch.optim.Adam(p), r"would need the update adam\(\), the program has sgd\(\)"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9), r"would need the update sgd\(momentum\)"),
        (lambda p: torch.optim.SGD(p, 0.1, maximize=True), "would need the update"),
        (lambda p: torch.optim.SGD(p[1:], 0.1), "of the program differ in a.weight"),
        (
            lambda p: torch.optim.SGD([{"params": p[1:]}, {"params": p[:1]}], 0.1),
            "has 2 parameter groups, the program 1",
        ),
    ],
)
def test_refresh_refuses_another_structure(change, said):
    parameters = small_model()
    groups = describe(torch.optim.SGD(parameters.values(), 0.1), parameters)
    with pytest.raises(InputError, match=said):
        refresh(groups, change(list(parameters.values())), parameters)


def test_refresh_refuses_a_parameter_that_changed_groups():
    parameters = small_model()
    a, b, c = parameters.values()
    groups = describe(torch.optim.SGD([{"params": [a]}, {"params": [b, c]}], 0.1), parameters)
    moved = torch.optim.SGD([{"params": [a, b]}, {"params": [c]}], 0.1)
    with pytest.raises(InputError, match=r"differ in a\.bias"):
        refresh(groups, moved, parameters)


# --- State ---------------------------------------------------------------------------------------

OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5, 0.01),
    lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    lambda p: torch.optim.RMSprop(p, 0.1, eps=1e-3, momentum=0.9, centered=True),
    lambda p: torch.optim.RMSprop(p, 0.1, eps=1e-3),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_may_change_sides_at_any_step(make):
    """Two steps in torch, two in the core, two in torch again are six steps in torch."""
    expected, parameters = small_model(), small_model()
    reference = make(list(expected.values()))
    torch_steps(reference, expected, range(6))

    optimizer = make(list(parameters.values()))
    torch_steps(optimizer, parameters, range(2))
    groups = describe(optimizer, parameters)
    states = import_state(groups, optimizer, parameters)
    states = core_steps(groups, parameters, states, range(2, 4))
    export_state(states, groups, optimizer, parameters)
    restored = make(list(parameters.values()))  # by way of a checkpoint
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch_steps(restored, parameters, range(4, 6))
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
    for name, state in restored.state.items():
        twin = reference.state[expected[next(k for k, p in parameters.items() if p is name)]]
        assert state.keys() == twin.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, twin[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_new_optimizer_has_no_state_to_import(make):
    parameters = small_model()
    optimizer = make(list(parameters.values()))
    groups = describe(optimizer, parameters)
    assert import_state(groups, optimizer, parameters) == {}
    assert not optimizer.state  # asking does not make entries


def test_a_momentum_that_never_started_is_not_exported():
    """So that torch's first step is undampened there too."""
    parameters = small_model()
    optimizer = torch.optim.SGD(parameters.values(), 0.1, 0.9, 0.5)
    groups = describe(optimizer, parameters)
    states = core_steps(groups, parameters, {}, range(0))
    export_state(states, groups, optimizer, parameters)
    assert not optimizer.state


def test_exported_state_is_a_copy_in_the_dtype_of_the_parameter():
    parameters = small_model(torch.float16)
    optimizer = torch.optim.SGD(parameters.values(), 0.1, 0.9)
    groups = describe(optimizer, parameters)
    states = {
        name: {"momentum_buffer": torch.ones(p.shape), "momentum_started": torch.ones(())}
        for name, p in parameters.items()
    }
    export_state(states, groups, optimizer, parameters)
    states["b"]["momentum_buffer"].zero_()
    for parameter in parameters.values():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert buffer.dtype == torch.float16
        assert torch.equal(buffer, torch.ones_like(parameter))


def test_refuses_state_of_another_model():
    parameters = small_model()
    optimizer = torch.optim.SGD(parameters.values(), 0.1, 0.9)
    optimizer.state[parameters["a.bias"]]["momentum_buffer"] = torch.ones(7)
    groups = describe(optimizer, parameters)
    with pytest.raises(InputError, match=r"momentum_buffer of a.bias .* shape \[7\], not \[4\]"):
        import_state(groups, optimizer, parameters)
