"""Check the operators of rules: their kernels against torch, their functions against kernels."""

from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from ipu_dynamo.ops.updates.update_functions import HYPERPARAMETERS, LEFT_OUT
from ipu_dynamo.ops.updates.update_operators import DECOMPOSITIONS, OPERATORS, STATES

NUMBERS = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.3,
    "weight_decay": 0.05,
    "beta1": 0.9,
    "beta2": 0.99,
    "alpha": 0.9,
    "eps": 1e-3,
    "max_weight_norm": 2.0,
}
# flags that add a state, and that state
ADDED = {
    "momentum": ("momentum_buffer", "momentum_started"),
    "amsgrad": ("max_exp_avg_sq",),
    "centered": ("grad_avg",),
}
FLAGS = {
    "sgd": ("momentum", "nesterov", "maximize", "dampen_first_step", "stateless_dampening"),
    "adam": ("decoupled_weight_decay", "amsgrad", "maximize"),
    "rmsprop": ("centered", "momentum", "maximize", "tensorflow"),
    "lamb": ("uncorrected",),
}


def arguments(rule, flags, zeros=(), *, shape=(5, 3), dtype=torch.float32, of_states=None):
    """What an operator takes, in the middle of a training."""
    rng = torch.Generator().manual_seed(0)
    absent = {state for flag, added in ADDED.items() if flag not in flags for state in added}
    tensors = {name: torch.rand(shape, generator=rng).to(of_states or dtype)
               for name in STATES[rule]}  # fmt: skip
    if "grad_avg" in tensors:  # the mean of squares is at least the square of the mean
        tensors["grad_avg"] = tensors["square_avg"] * 0.5
    tensors |= {"step": torch.tensor(3.0), "momentum_started": torch.tensor(1.0)}
    states = [None if name in absent else tensors[name] for name in STATES[rule]]
    numbers = [
        None if name in zeros else torch.tensor(NUMBERS[name], dtype=torch.float64)
        for name in HYPERPARAMETERS[rule]
    ]
    weight, gradient = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    return weight, gradient, *states, *numbers


def run_now(operator, *args):
    """Run an operator on tensors, in place of writing it into a graph."""
    return operator(*args)


rules = st.sampled_from([*FLAGS]).flatmap(
    lambda rule: st.tuples(st.just(rule), st.sets(st.sampled_from(FLAGS[rule])))
)


@given(chosen=rules, zeros=st.sets(st.sampled_from(sorted(LEFT_OUT))), dimensionless=st.booleans())
@example(chosen=("adam", {"amsgrad"}), zeros=set(), dimensionless=True)
def test_functions_agree_with_kernels(chosen, zeros, dimensionless):
    rule, flags = chosen
    if "nesterov" in flags:
        flags = flags | {"momentum"}
    shape = () if dimensionless else (5, 3)
    given_ = arguments(rule, flags, zeros, shape=shape)
    if "momentum" in zeros and "momentum" in flags and "dampen_first_step" not in flags:
        flags = flags - {"stateless_dampening"}  # which no momentum at all asks for
    operator = OPERATORS[rule]
    before = [None if value is None else value.clone() for value in given_]
    kernel = operator(*given_, flags=sorted(flags))
    function = DECOMPOSITIONS[operator](run_now, *given_, flags=sorted(flags))
    torch.testing.assert_close(function, kernel, rtol=1e-5, atol=1e-6)
    for old, value in zip(before, given_, strict=True):
        assert old is value or torch.equal(old, value), "an operator is pure"


@pytest.mark.parametrize("flags", [[], ["uncorrected"]])
@pytest.mark.parametrize("left_out", [(), ("weight_decay",)])
def test_lamb_multiplies_weights_by_a_decay_of_zero(flags, left_out):
    """0.0 times an infinite weight is NaN, and so is the change of all its elements."""
    weight, gradient, *rest = arguments("lamb", flags, left_out)
    weight[0, 0] = torch.inf
    if not left_out:
        rest[len(STATES["lamb"]) + HYPERPARAMETERS["lamb"].index("weight_decay")].zero_()
    operator = OPERATORS["lamb"]
    for step in (operator, partial(DECOMPOSITIONS[operator], run_now)):
        new, *_ = step(weight, gradient, *rest, flags=flags)
        assert new.isnan().all()


@given(chosen=rules)
def test_operators_say_which_types_they_return(chosen):
    rule, flags = chosen
    given_ = arguments(rule, flags, dtype=torch.bfloat16, of_states=torch.float32)
    real = OPERATORS[rule](*given_, flags=sorted(flags))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPERATORS[rule](*given_, flags=sorted(flags))
    function = DECOMPOSITIONS[OPERATORS[rule]](run_now, *given_, flags=sorted(flags))
    for a, b, c in zip(real, fake, function, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert (a.dtype, a.shape) == (c.dtype, c.shape)
    torch.testing.assert_close(function, real, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rule", "flag"), [("sgd", "momentum"), ("adam", "amsgrad")])
def test_a_flag_without_its_state_is_refused(rule, flag):
    """A kernel would read past the end of an empty list, and files may call operators."""
    with pytest.raises(KeyError, match=ADDED[flag][0]):
        OPERATORS[rule](*arguments(rule, ()), flags=[flag])


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, dampening=0.3, weight_decay=0.05, fused=True),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05, fused=True),
}


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_kernels_have_the_bits_of_torch(rule):
    flags = ["momentum"] if rule == "sgd" else []
    weight, gradient, *rest = arguments(rule, flags)
    expected = torch.nn.Parameter(weight.clone())
    expected.grad = gradient.clone()
    optimizer = OPTIMIZERS[rule]([expected], lr=NUMBERS["lr"])
    states = {n: t.clone() for n, t in zip(STATES[rule], rest, strict=False) if t is not None}
    optimizer.state[expected] = states
    optimizer.step()
    new, *_ = OPERATORS[rule](weight, gradient, *rest, flags=flags)
    assert torch.equal(new, expected)
