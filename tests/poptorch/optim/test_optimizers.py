"""Check the optimizers as objects on the host: arguments, steps, attributes and copies."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch import optim
from poptorch.optim import adam

PARENTS = {
    optim.SGD: torch.optim.SGD,
    optim.Adam: torch.optim.Adam,
    optim.AdamW: torch.optim.AdamW,
    optim.RMSprop: torch.optim.RMSprop,
}
CLASSES = [*PARENTS, optim.LAMB]
MOMENTS = "accum_type first_order_momentum_accum_type second_order_momentum_accum_type"
ARGUMENTS = {
    optim.SGD: "lr momentum dampening weight_decay nesterov maximize foreach differentiable "
    "loss_scaling velocity_scaling use_combined_accum accum_type velocity_accum_type max_grad_norm",
    optim.Adam: "lr betas eps weight_decay amsgrad foreach maximize capturable differentiable "
    f"fused loss_scaling {MOMENTS} max_grad_norm",
    optim.AdamW: "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable "
    f"fused loss_scaling bias_correction {MOMENTS} max_grad_norm",
    optim.RMSprop: "lr alpha eps weight_decay momentum centered foreach maximize differentiable "
    f"loss_scaling {MOMENTS} use_tf_variant",
    optim.LAMB: f"lr betas eps weight_decay bias_correction loss_scaling max_weight_norm {MOMENTS}",
}


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((3, 4), (5,), ())
    ]


def train(optimizer, steps=4):
    """Step on gradients that depend on the step, and return the parameters' values."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("cls", CLASSES)
def test_arguments_have_poptorchs_order_and_are_optional(cls):
    signature = list(inspect.signature(cls).parameters.values())
    assert [p.name for p in signature] == ["params", *ARGUMENTS[cls].split()]
    required = {p.name for p in signature if p.default is inspect.Parameter.empty}
    assert required == {"params"} | ({"lr"} if cls is optim.SGD else set())
    assert {p.default for p in signature if p.name not in required} == {None}


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_derive_from_the_mixin_and_torchs(cls):
    optimizer = cls(parameters(), lr=0.1)
    assert isinstance(optimizer, optim.Optimizer)
    assert isinstance(optimizer, PARENTS.get(cls, torch.optim.Optimizer))


@pytest.mark.parametrize("cls", PARENTS)
def test_defaults_are_torchs(cls):
    ours, theirs = cls(parameters(), lr=0.1), PARENTS[cls](parameters(), lr=0.1)
    assert ours.defaults == theirs.defaults
    assert cls is optim.SGD or cls(parameters()).defaults == PARENTS[cls](parameters()).defaults


def test_own_defaults():
    assert optim.LAMB(parameters()).defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    }
    for cls in CLASSES:
        optimizer = cls(parameters(), lr=0.1)
        for name, default in {
            "loss_scaling": 1.0,
            "use_combined_accum": False,
            "accum_type": torch.float32,
            "velocity_accum_type": torch.float32,
            "first_order_momentum_accum_type": torch.float32,
            "second_order_momentum_accum_type": torch.float32,
            "max_grad_norm": math.inf,
            "bias_correction": True,
            "use_tf_variant": False,
        }.items():
            assert hasattr(optimizer, name) == (name in ARGUMENTS[cls].split())
            assert getattr(optimizer, name, default) == default


HYPERPARAMETERS = {
    optim.SGD: [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "loss_scaling": 8.0},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "accum_type": torch.float16},
        {"lr": 0.1, "maximize": True, "foreach": True},
    ],
    optim.Adam: [{}, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}],
    optim.AdamW: [{}, {"lr": 0.1, "weight_decay": 0.2, "amsgrad": True, "max_grad_norm": 1.0}],
    optim.RMSprop: [{}, {"lr": 0.1, "alpha": 0.5, "momentum": 0.9, "centered": True}],
}
CASES = [(cls, arguments) for cls in HYPERPARAMETERS for arguments in HYPERPARAMETERS[cls]]


@pytest.mark.parametrize(("cls", "arguments"), CASES)
def test_steps_on_the_host_are_torchs(cls, arguments):
    known = inspect.signature(PARENTS[cls]).parameters
    for_torch = {name: value for name, value in arguments.items() if name in known}
    ours = train(cls(parameters(), **arguments))
    theirs = train(PARENTS[cls](parameters(), **for_torch))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_accumulation_types_are_float_or_half(cls):
    for name in ARGUMENTS[cls].split():
        if name.endswith("accum_type"):
            assert getattr(cls(parameters(), 0.1, **{name: torch.float16}), name) == torch.float16
            text = "Accumulation types must be either torch.float32 or torch.float16"
            with pytest.raises(AssertionError, match=text):
                cls(parameters(), 0.1, **{name: torch.bfloat16})


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW])
def test_a_norm_that_is_no_number_is_refused(cls):
    assert cls(parameters(), lr=0.1, max_grad_norm=2.0).max_grad_norm == 2.0
    with pytest.raises(poptorch.Error, match="Maximum norm of gradients cannot be NaN"):
        cls(parameters(), lr=0.1, max_grad_norm=math.nan)


def test_velocity_scaling_belongs_to_groups_of_the_combined_variant(capsys):
    first, *others = parameters()
    groups = [{"params": [first], "velocity_scaling": 4.0}, {"params": others}]
    optimizer = optim.SGD(groups, lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
    assert [group["velocity_scaling"] for group in optimizer.param_groups] == [4.0, 2.0]
    assert not optimizer.variable_attrs.isConstant("velocity_scaling")
    assert optim.SGD(others, 0.1, use_combined_accum=True).defaults["velocity_scaling"] == 1.0
    assert not capsys.readouterr().err
    separate = optim.SGD(others, lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling is ignored" in capsys.readouterr().err
    assert "velocity_scaling" not in separate.defaults
    assert "velocity_scaling" not in separate.param_groups[0]


def test_adamw_says_once_that_it_corrects_the_bias(capsys):
    adam._warn_that_bias_is_corrected.cache_clear()
    for _ in range(2):
        assert not optim.AdamW(parameters(), bias_correction=False).bias_correction
    assert capsys.readouterr().err.count("still corrects the bias") == 1
    optim.AdamW(parameters(), bias_correction=True)
    assert not capsys.readouterr().err


@given(data=st.data(), cls=st.sampled_from(CLASSES))
def test_what_is_passed_is_variable(data, cls):
    values = {"lr": 0.1, "betas": (0.8, 0.9), "loss_scaling": 2.0, "max_weight_norm": 3.0}
    values |= {"momentum": 0.0, "weight_decay": 0.0, "eps": 1e-8, "alpha": 0.5, "dampening": 0.0}
    known = [name for name in values if name in ARGUMENTS[cls].split()]
    chosen = data.draw(st.sets(st.sampled_from(known))) | {"lr"}
    attributes = cls(parameters(), **{name: values[name] for name in chosen}).variable_attrs
    assert {name for name in known if not attributes.isConstant(name)} == chosen


def test_constness_can_be_changed():
    attributes = optim.SGD(parameters(), lr=0.1).variable_attrs
    attributes.markAsVariable("momentum")
    attributes.markAsConstant("lr")
    attributes.markAsConstant("loss_scaling")
    assert not attributes.isConstant("momentum")
    assert attributes.isConstant("lr")
    assert attributes.isConstant("no such attribute")
    for mark in (attributes.markAsConstant, attributes.markAsVariable):
        with pytest.raises(AssertionError, match="Unknown attribute 'betas'"):
            mark("betas")
    separate = optim.VariableAttributes(["lr"], ["lr", "momentum"])
    assert repr(separate) == "VariableAttributes(['lr'], ['lr', 'momentum'])"


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]
)
def test_copies_keep_attributes_and_state(cls, twin):
    name = "velocity_accum_type" if cls is optim.SGD else "first_order_momentum_accum_type"
    optimizer = cls(parameters(), lr=0.1, loss_scaling=4.0, **{name: torch.float16})
    train(optimizer)
    again = twin(optimizer)
    assert type(again) is cls
    assert again.loss_scaling == 4.0
    assert getattr(again, name) == torch.float16
    again.variable_attrs.markAsConstant("lr")
    assert not optimizer.variable_attrs.isConstant("lr")
    assert not again.variable_attrs.isConstant("loss_scaling")
    if twin is not copy.copy:
        assert all(torch.equal(a, b) for a, b in zip(train(optimizer), train(again), strict=True))


def test_a_scheduler_drives_the_groups():
    optimizer = optim.SGD(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, steps=1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert copy.deepcopy(optimizer).param_groups[0]["initial_lr"] == 0.1


def test_the_package_exports_optim():
    assert poptorch.optim is optim
    assert {cls.__name__ for cls in CLASSES} < set(optim.__all__)
