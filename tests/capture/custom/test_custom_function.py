"""Check that custom autograd functions keep their backward, and that hooks are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_dynamo import CompileError, InputError, compile_inference, compile_training
from ipu_dynamo.testing import assert_same_inference, assert_same_training

EAGER = {"engine": "eager"}


class Steep(torch.autograd.Function):
    """The identity, with seven times its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Split(torch.autograd.Function):
    """Several results, Python arguments, saved tensors, and a result without gradient."""

    @staticmethod
    def forward(ctx, x, factor, options, y=None):
        ctx.save_for_backward(x)
        ctx.factor = factor
        above = x > 0
        ctx.mark_non_differentiable(above)
        return x * factor, options["name"], above, x.sum()

    @staticmethod
    def backward(ctx, first, name, above, total):
        (x,) = ctx.saved_tensors
        return first * ctx.factor * 3 + total * x, None, None, None


class Tripled(torch.autograd.Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Setup(torch.autograd.Function):
    """Written with `setup_context`, and called with a keyword."""

    @staticmethod
    def forward(x, factor, power=1):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor * 5, None, None


class Model(nn.Module):
    """A linear layer before `function`, a loss after it."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2), function

    def forward(self, x, y):
        return F.mse_loss(self.function(self.layer(x)), y)


CHANGED = (  # by a trace
    torch.autograd,
    torch.autograd.Function,
    torch.autograd.function._SingleLevelFunction,
    type(torch.autograd.Function),
    torch.Tensor,
)


def batch():
    torch.manual_seed(0)
    return torch.randn(4, 3), torch.randn(4, 2)


def split(h):
    first, name, above, total = Split.apply(h, 2.0, {"name": "n"})
    assert name == "n"
    return first + above + total


@pytest.mark.parametrize(
    "function",
    [
        Steep.apply,
        lambda h: Steep.apply(Steep.apply(h) * 2),
        lambda h: Setup.apply(h, factor=2.0),
        split,
        lambda h: h + Tripled.apply(h),
        lambda h: checkpoint(lambda t: torch.tanh(t) * 2, h, use_reentrant=True),
        lambda h: checkpoint(lambda t: Steep.apply(t) * 2, h, use_reentrant=False),
    ],
    ids=[
        "taken before",
        "nested",
        "setup_context",
        "several results",
        "in place",
        "reentrant checkpoint",
        "checkpoint",
    ],
)
def test_gradient_is_that_of_the_custom_backward(function):
    torch.manual_seed(0)
    assert_same_training(Model(function), [batch()] * 2, EAGER)


def test_custom_function_differs_from_the_traced_forward():
    """The test above could not fail if Steep's backward were that of its forward."""
    model = Model(Steep.apply)
    plain = Model(lambda h: h)
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        compile_training(m, torch.optim.SGD(m.parameters(), lr=0.1), EAGER)(*batch())
    assert not torch.allclose(model.layer.weight, plain.layer.weight)


def test_custom_function_without_tensors_is_a_constant():
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx, size):
            return torch.ones(size)

        @staticmethod
        def backward(ctx, gradient):
            return None

    model = nn.Module()
    model.forward = lambda x: x + Ones.apply(3)
    assert_same_inference(model, [torch.ones(3)], EAGER)


def test_inference_runs_the_forward():
    assert_same_inference(Model(split), [batch()], EAGER)


def test_autograd_works_as_before_after_a_compilation():
    before = [dict(vars(changed)) for changed in CHANGED]
    compile_inference(Model(Steep.apply), EAGER)(*batch())
    assert [dict(vars(changed)) for changed in CHANGED] == before
    x = torch.ones(2, requires_grad=True)
    Steep.apply(x).sum().backward()
    assert x.grad.tolist() == [7, 7]


def compiling(model):
    return compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)


@pytest.mark.parametrize(
    ("add_hook", "message"),
    [
        (lambda m: m.layer.register_full_backward_hook(lambda *_: None), "module layer"),
        (lambda m: m.register_full_backward_pre_hook(lambda *_: None), "module Model"),
        (lambda m: m.layer.weight.register_hook(lambda g: g * 2), "parameter layer.weight"),
        (
            lambda m: m.layer.bias.register_post_accumulate_grad_hook(lambda p: None),
            "parameter layer.bias",
        ),
    ],
    ids=["module", "module before", "parameter", "parameter after"],
)
def test_hooks_on_gradients_are_refused(add_hook, message):
    model = Model(lambda h: h)
    add_hook(model)
    with pytest.raises(CompileError, match=f"hook of {message} would not run"):
        compiling(model)(*batch())


def test_forward_hooks_run_in_the_trace():
    model = Model(lambda h: h)
    model.layer.register_forward_hook(lambda module, args, result: result * 2)
    assert_same_training(model, [batch()], EAGER)


LIMIT = torch.tensor([0.5, 0.25])


class Capped(torch.autograd.Function):
    """Makes a constant, and reads a tensor from outside."""

    @staticmethod
    def forward(ctx, x):
        return torch.minimum(x, torch.tensor(0.75)) * LIMIT

    @staticmethod
    def backward(ctx, gradient):
        return gradient * LIMIT * 0.1


def test_constants_of_a_function_are_the_programs():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    expected = copy.deepcopy(model)

    class Loss(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return F.mse_loss(Capped.apply(self.layer(x)), x[:, :2])

    ours, theirs = Loss(model), Loss(expected)
    step = compile_training(ours, torch.optim.SGD(ours.parameters(), lr=0.1), {"engine": "eager"})
    x = torch.randn(4, 3)
    message = r"the tensor \(2,\) is neither[\s\S]*Capped.apply"
    with pytest.warns(UserWarning, match=message) as told:
        torch.testing.assert_close(step(x), theirs(x).detach())
    assert len(told) == 1  # the number that forward has made is nobody else's
    theirs(x).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, expected.weight)
    LIMIT.mul_(2)
    try:
        with pytest.raises(InputError, match="another value than when the program was compiled"):
            step(x)
    finally:
        LIMIT.div_(2)
