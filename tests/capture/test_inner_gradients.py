"""Check gradients that a model takes in forward, and hooks on its tensors, against PyTorch."""

import copy

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, CompileError, Options

EAGER = Options(engine="eager")


class Net(nn.Module):
    """A model whose loss is `loss(net, x, y)`."""

    def __init__(self, loss):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.GRU(3, 2)
        self.loss = loss

    def energy(self, x):
        return self.second((self.first(x) * self.scale).tanh()).sum()

    def forward(self, x, y):
        return ipu_dynamo.identity_loss(self.loss(self, x, y), "none")


def force_matching(net, x, y):
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(net.energy(x), x, create_graph=True)
    return (force + y).square().mean()


def input_made_to_require_a_gradient(net, x, y):
    x.requires_grad = True
    (force,) = torch.autograd.grad(net.energy(x), [x], create_graph=True)
    return (force + y).square().mean() + x.sum()


def new_tensor(net, x, y):
    shift = torch.zeros(4, 1, requires_grad=True)
    (force,) = torch.autograd.grad(net.energy(x + shift), shift, create_graph=True)
    return (force + y).square().mean()


def penalty_of_weights(net, x, y):
    loss = (net.energy(x) - y.sum()).square()
    weights = [net.first.weight, net.second.bias]
    norms = [g.square().sum() for g in torch.autograd.grad(loss, weights, create_graph=True)]
    return loss + 0.1 * sum(norms)


def constant_gradient(net, x, y):
    """Without `create_graph` the gradient is a number for autograd."""
    (steepness,) = torch.autograd.grad(net.energy(x), net.scale, retain_graph=True)
    return net.energy(x) * steepness


def unused_input(net, x, y):
    first, other = torch.autograd.grad(
        net.energy(x), [net.scale, net.first.bias[:2].clone()], create_graph=True, allow_unused=True
    )
    assert other is None
    return first * net.scale


def second_derivative(net, x, y):
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(net.energy(x), x, create_graph=True)
    (laplacian,) = torch.autograd.grad(force.square().sum(), x, create_graph=True)
    return laplacian.square().sum() + net.energy(x)


def functional(net, x, y):
    force, value = torch.func.grad_and_value(net.energy)(x)
    return (force + y).square().mean() + value


def nested_functional(net, x, y):
    def slope(x):
        force, (aux,) = torch.func.grad(lambda x: (net.energy(x), (x * net.scale,)), has_aux=True)(
            x
        )
        return (force * aux).sum()

    return (torch.func.grad(slope)(x) + y).square().mean()


def custom_function(net, x, y):
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos() * 2

    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(Steep.apply(net.first(x)).sum(), x, create_graph=True)
    return (force + y).square().mean()


def hook_reads_a_weight(net, x, y):
    h = net.first(x)
    h.register_hook(lambda gradient: gradient * net.second.weight)
    return net.second(h.tanh()).square().mean()


def hook_in_an_inner_gradient(net, x, y):
    x = x.detach().requires_grad_()
    h = net.first(x)
    h.register_hook(lambda gradient: gradient.clamp(max=0.2))
    (force,) = torch.autograd.grad(h.tanh().sum(), x, create_graph=True)
    return (force + y).square().mean()


def layer_made_in_forward(net, x, y):
    ones = nn.Parameter(torch.zeros(3))
    nn.init.ones_(ones)
    return net.energy(x * ones)


LOSSES = [
    layer_made_in_forward,
    force_matching,
    input_made_to_require_a_gradient,
    new_tensor,
    penalty_of_weights,
    constant_gradient,
    unused_input,
    second_derivative,
    functional,
    nested_functional,
    custom_function,
    hook_reads_a_weight,
    hook_in_an_inner_gradient,
]


@pytest.mark.few(7)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_training_is_that_of_pytorch(loss, accumulation):
    torch.manual_seed(0)
    model = Net(loss).double()
    x, y = torch.randn(2, 4 * accumulation, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    step = ipu_dynamo.compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Options(engine="eager", gradient_accumulation=accumulation),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        step(x.clone(), y.clone())
        optimizer.zero_grad()
        for part in zip(x.clone().chunk(accumulation), y.chunk(accumulation), strict=True):
            (plain(*part) / accumulation).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["off", "all"])
def test_a_hook_runs_in_backward_however_the_last_stage_is_computed(recompute):
    torch.manual_seed(0)
    model = Net(hook_reads_a_weight).double()
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ipu_dynamo.compile_training(model, optimizer, Options(engine="eager", recompute=recompute))(
        x, y
    )
    plain(x, y).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        change = 0 if theirs.grad is None else 0.1 * theirs.grad
        assert torch.allclose(ours, theirs - change, rtol=1e-9, atol=1e-12)


def test_inference_says_where_gradients_are_not_enabled():
    class Force(Net):
        def forward(self, x):
            (force,) = torch.autograd.grad(self.energy(x.requires_grad_()), x)
            return force

    with pytest.raises(CompileError, match=r"(?s)requires a gradient.*enable_grad") as caught:
        ipu_dynamo.compile_inference(Force(None).eval(), EAGER)(torch.randn(4, 3))
    assert "from: test_inner_gradients.py:" in str(caught.value)


def test_inference_takes_gradients_where_they_are_enabled():
    class Force(Net):
        def forward(self, x):
            with torch.enable_grad():
                x.requires_grad_()
                (force,) = torch.autograd.grad(self.energy(x), x)
            return -force

    model, x = Force(None).eval(), torch.randn(4, 3)
    expected = model(x.clone()).detach()
    assert torch.allclose(ipu_dynamo.compile_inference(model, EAGER)(x), expected)


def test_takes_gradients_within_a_stage():
    class Staged(Net):
        def forward(self, x, y):
            with Block(ipu_id=0):
                x = x * self.scale
            with Block(ipu_id=1):
                (force,) = torch.autograd.grad(
                    self.second(self.first(x).tanh()).sum(), x, create_graph=True
                )
                return ipu_dynamo.identity_loss((force + y).square().mean(), "none")

    torch.manual_seed(0)
    model = Staged(None)
    x, y = torch.randn(2, 4, 3)
    plain = copy.deepcopy(model)
    options = Options(engine="eager", gradient_accumulation=2)
    step = ipu_dynamo.compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    step(torch.cat([x, x]), torch.cat([y, y]))
    plain(x, y).backward()
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0 if p.grad is None else 0.1 * p.grad
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def looks(net, x, y):
    h = net.first(x)
    h.register_hook(lambda gradient: print(gradient.shape))
    return h.sum()


def removes(net, x, y):
    h = net.first(x)
    h.register_hook(lambda gradient: gradient * 2).remove()
    return h.sum()


def calls_backward(net, x, y):
    net.energy(x).backward()
    return net.first.weight.grad.sum()


def through_a_loop(net, x, y):
    x = x * net.scale
    (result,) = ipu_dynamo.for_loop(3, lambda h: h.sin(), [x])
    (force,) = torch.autograd.grad(result.sum() + x.sum(), x, create_graph=True)
    return force.square().sum()


def through_a_layer(net, x, y):
    states, _ = net.layer(x * net.scale)
    (force,) = torch.autograd.grad(states.sum(), net.scale, create_graph=True)
    return force.square()


def rows(net, x, y):
    return torch.func.vmap(torch.func.grad(net.energy))(x).square().sum()


def batched(net, x, y):
    x = x.detach().requires_grad_()
    (rows_of_it,) = torch.autograd.grad(
        net.first(x)[:, 0], x, torch.eye(4), is_grads_batched=True, create_graph=True
    )
    return rows_of_it.square().sum()


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (batched, "several rows at once"),
        (looks, "returns None"),
        (removes, "removes a hook"),
        (calls_backward, "calls backward"),
        (through_a_loop, "passes through a loop"),
        (through_a_layer, "passes through a loop"),
        (rows, "several rows at once"),
    ],
)
def test_what_a_program_cannot_have_is_refused_with_its_line(loss, problem):
    model = Net(loss)
    step = ipu_dynamo.compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    with pytest.raises(CompileError, match=problem) as caught:
        step(*torch.randn(2, 4, 3))
    assert "from: test_inner_gradients.py:" in str(caught.value)
