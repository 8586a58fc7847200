"""Check that a compiled model notices when the model is no longer what was compiled."""

import pytest
import torch
from torch import nn

from ipu_dynamo import InputError, Options, compile_inference, compile_training

EAGER = Options("eager")
X, Y = torch.randn(8, 4), torch.randint(3, (8,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.last = nn.Linear(5, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.body(x)), y)


def compiled(model, *, training):
    if training:
        return compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    return compile_inference(model, EAGER)


def replace_parameter(model):
    model.last.weight = nn.Parameter(torch.zeros(3, 5))


def assign(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_buffer(model):
    model.body[1].running_mean = torch.ones(5)


def remove(model):
    model.last.bias = None


def replace_module(model):
    model.last = nn.Linear(5, 3)


CHANGES = {
    "parameter last.weight": replace_parameter,
    "parameter body.0.weight": assign,
    "buffer body.1.running_mean": replace_buffer,
    "parameter last.bias": remove,
    "module last": replace_module,
}


@pytest.mark.few(5)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_replaced_part_is_refused_until_it_is_compiled(what, training):
    model = Net()
    run = compiled(model, training=training)
    run(X, Y)
    CHANGES[what](model)
    with pytest.raises(InputError, match=rf"{what} is not the one .*replaced or removed"):
        run(X, Y)
    if not training:
        model.eval()
        run.compile(X, Y)
        torch.testing.assert_close(run(X, Y), model(X, Y).detach())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (nn.Module.eval, "the model is in eval mode, and was in train mode"),
        (lambda m: m.body[2].eval(), r"module body\.2 is in eval mode"),
    ],
)
def test_another_mode_is_refused(change, text, training):
    model = Net()
    run = compiled(model, training=training)
    run(X, Y)
    change(model)
    with pytest.raises(InputError, match=text):
        run(X, Y)
    model.train()
    run(X, Y)


def test_a_mode_may_change_between_two_calls():
    model = Net()
    step = compiled(model, training=True)
    step(X, Y)
    model.eval()(X, Y)
    model.train()
    step(X, Y)


def test_a_frozen_parameter_is_refused_in_training_only():
    model = Net()
    step, run = compiled(model, training=True), compiled(model, training=False)
    step(X, Y)
    run(X, Y)
    model.last.weight.requires_grad_(False)
    run(X, Y)
    with pytest.raises(InputError, match=r"parameter last.weight had requires_grad=True"):
        step(X, Y)
    step.compile(X, Y)
    before = model.last.weight.clone()
    step(X, Y)
    assert torch.equal(model.last.weight, before)


def test_values_may_change_in_place():
    model = Net().eval()
    run = compiled(model, training=False)
    run(X, Y)
    model.load_state_dict(Net().state_dict())
    torch.testing.assert_close(run(X, Y), model(X, Y).detach())


def test_what_is_added_or_put_back_is_no_change():
    model = Net()
    run = compiled(model, training=False)
    run(X, Y)
    model.body[0].register_buffer("more", torch.ones(1))
    model.body[0].register_parameter("another", None)
    weight = model.last.weight
    del model.last.weight
    model.last.weight = weight  # behind the bias now
    run(X, Y)


def test_a_removed_last_part_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = compile_inference(model, EAGER)
    run(X)
    del model[1]
    with pytest.raises(InputError, match="module 1 is not the one"):
        run(X)
