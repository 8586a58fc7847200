"""Check what an executor reads from an optimizer, and which ones it refuses."""

import pytest
import torch

import poptorch
from poptorch import optim
from poptorch.optim import read_optimizer


def weights(count=2):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


KINDS = {
    optim.SGD: ("sgd", torch.optim.SGD),
    optim.Adam: ("adam", torch.optim.Adam),
    optim.AdamW: ("adamw", torch.optim.AdamW),
    optim.RMSprop: ("rmsprop", torch.optim.RMSprop),
    optim.LAMB: ("lamb", None),
    torch.optim.SGD: ("sgd", torch.optim.SGD),
    torch.optim.Adam: ("adam", torch.optim.Adam),
    torch.optim.AdamW: ("adamw", torch.optim.AdamW),
    torch.optim.RMSprop: ("rmsprop", torch.optim.RMSprop),
}


@pytest.mark.parametrize("cls", KINDS)
def test_every_class_is_known(cls, capsys):
    reading = read_optimizer(cls(weights(), lr=0.25))
    assert (reading.kind, reading.torch_class) == KINDS[cls]
    assert reading.groups[0].values["lr"] == 0.25
    assert "lr" not in reading.groups[0].constant
    assert not capsys.readouterr().err


@pytest.mark.parametrize("cls", KINDS)
def test_a_subclass_is_read_as_its_base_with_a_warning(cls, capsys):
    derived = type("Mine", (cls,), {})
    assert read_optimizer(derived(weights(), lr=0.1)).kind == KINDS[cls][0]
    warning = capsys.readouterr().err
    assert "Poptorch does not run Python optimizer code directly" in warning
    assert f"Mine is a subclass of {cls.__name__}" in warning


def test_groups_and_shared_settings():
    first, second = weights()
    optimizer = optim.SGD(
        [{"params": [first], "lr": 0.5}, {"params": [second], "momentum": 0.9}],
        lr=0.1,
        use_combined_accum=True,
        velocity_scaling=2.0,
        max_grad_norm=3.0,
    )
    optimizer.loss_scaling = 16.0
    reading = read_optimizer(optimizer)
    assert [group.parameters for group in reading.groups] == [(first,), (second,)]
    assert reading.groups[0].values == {
        "lr": 0.5,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "velocity_scaling": 2.0,
        "nesterov": False,
    }
    assert reading.groups[1].values["momentum"] == 0.9
    assert reading.groups[1].constant == {"momentum", "dampening", "weight_decay", "nesterov"}
    assert reading.settings["use_combined_accum"]
    assert (reading.settings["max_grad_norm"], reading.settings["loss_scaling"]) == (3.0, 16.0)


@pytest.mark.parametrize(
    ("cls", "arguments", "constant"),
    [
        (torch.optim.SGD, {}, {"momentum", "dampening", "weight_decay", "nesterov"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"dampening", "weight_decay", "nesterov"}),
        (torch.optim.Adam, {}, {"betas", "eps", "weight_decay"}),
        (torch.optim.Adam, {"eps": 1e-6, "betas": (0.5, 0.5)}, {"betas", "weight_decay"}),
        (torch.optim.Adam, {"weight_decay": 0.01}, {"betas", "eps"}),
        (torch.optim.AdamW, {}, {"betas", "eps", "weight_decay"}),
        (torch.optim.AdamW, {"weight_decay": 0.0}, {"betas", "eps"}),
        (
            torch.optim.RMSprop,
            {"alpha": 0.5},
            {"alpha", "eps", "weight_decay", "momentum", "centered"},
        ),
        (optim.SGD, {"momentum": 0.0}, {"dampening", "weight_decay", "nesterov"}),
        (optim.AdamW, {"betas": (0.9, 0.999)}, {"eps", "weight_decay"}),
    ],
)
def test_constant_attributes(cls, arguments, constant):
    assert read_optimizer(cls(weights(), lr=0.1, **arguments)).groups[0].constant == constant


@pytest.mark.parametrize(
    ("optimizer", "automatic", "constant"),
    [
        (optim.SGD(weights(), lr=0.1), False, True),
        (optim.SGD(weights(), lr=0.1, loss_scaling=1.0), False, False),
        (optim.SGD(weights(), lr=0.1), True, False),
        (torch.optim.SGD(weights(), lr=0.1), False, True),
        (torch.optim.SGD(weights(), lr=0.1), True, False),
    ],
)
def test_the_loss_scale_is_variable_when_given_or_automatic(optimizer, automatic, constant):
    reading = read_optimizer(optimizer, automatic_loss_scaling=automatic)
    assert reading.loss_scaling_is_constant == constant


def test_other_classes_are_refused():
    with pytest.raises(AssertionError, match=r"Unsupported optimizer type\. Adagrad .*LAMB"):
        read_optimizer(torch.optim.Adagrad(weights()))


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_is_refused(cls):
    with pytest.raises(ValueError, match="Only non-amsgrad Adam/AdamW optimizers are supported"):
        read_optimizer(cls(weights(), lr=0.1, amsgrad=True))


@pytest.mark.parametrize("cls", [c for c in KINDS if c is not optim.LAMB])
def test_maximize_is_refused(cls):
    with pytest.raises(poptorch.Error, match="maximize=True is not supported"):
        read_optimizer(cls(weights(), lr=0.1, maximize=True))


def test_groups_agree_on_centering():
    first, second = weights()
    groups = [{"params": [first], "centered": True}, {"params": [second]}]
    with pytest.raises(AssertionError, match="must agree on centered"):
        read_optimizer(optim.RMSprop(groups))
    reading = read_optimizer(optim.RMSprop([first, second], centered=True))
    assert reading.groups[0].values["centered"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", torch.tensor(0.1)), ("betas", [0.9, 0.99]), ("betas", (0.9, torch.tensor(0.99)))],
)
def test_attributes_are_plain_numbers(name, value):
    optimizer = torch.optim.Adam(weights(), lr=0.1)
    optimizer.param_groups[0][name] = value
    with pytest.raises(AssertionError, match=f"{name} must be a"):
        read_optimizer(optimizer)
