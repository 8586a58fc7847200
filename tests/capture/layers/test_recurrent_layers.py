"""Check that programs call recurrent layers as operators, with the dropout between them."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_dynamo import Options, compile_inference, compile_training, explain
from ipu_dynamo.testing import assert_same_training
from ipu_dynamo.torch_compile import notices
from ipu_dynamo.torch_compile.backend import ipu

EAGER = {"engine": "eager"}
LAYERS = {
    "lstm": lambda **kwargs: nn.LSTM(3, 4, **kwargs),
    "lstm with projections": lambda **kwargs: nn.LSTM(3, 4, proj_size=2, **kwargs),
    "gru": lambda **kwargs: nn.GRU(3, 4, **kwargs),
    "rnn": lambda **kwargs: nn.RNN(3, 4, **kwargs),
    "rnn with relu": lambda **kwargs: nn.RNN(3, 4, nonlinearity="relu", **kwargs),
}
FORMS = {
    "three layers": {"num_layers": 3},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, without biases": {"num_layers": 2, "batch_first": True, "bias": False},
}
CASES = [
    ("lstm", "three layers"),
    ("lstm", "both directions"),
    ("lstm with projections", "batch first, without biases"),
    ("gru", "both directions"),
    ("rnn", "batch first, without biases"),
    ("rnn with relu", "three layers"),
]
cases = pytest.mark.parametrize(
    ("make", "form"), [(LAYERS[one], FORMS[form]) for one, form in CASES], ids=map(", ".join, CASES)
)


class Model(nn.Module):
    """All that a recurrent layer returns, in one sum."""

    def __init__(self, make, form, dropout, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = make(dropout=dropout, **form)
        self.checkpointed = checkpointed

    def forward(self, x):
        call = self.layer
        output, last = checkpoint(call, x, use_reentrant=False) if self.checkpointed else call(x)
        states = last if isinstance(last, tuple) else (last,)
        return output.square().sum() + sum(state.sum() for state in states)


@pytest.fixture
def allow_rnn():
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def step(model, call, x):
    """Loss and gradients from one state of the generator, and the number after it."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), torch.rand(1)]


def assert_draws_as_pytorch(make, form, *, checkpointed=False):
    x = torch.randn(3, 2, 3)
    plain = Model(make, form, 0.5)
    expected = step(plain, plain, x)
    model = Model(make, form, 0.5, checkpointed)
    call = torch.compile(model, backend=ipu, fullgraph=True, options=EAGER)
    torch.testing.assert_close(step(model, call, x), expected)


@pytest.mark.few(3)
@pytest.mark.usefixtures("allow_rnn")
@cases
def test_torch_compile_draws_as_pytorch(make, form):
    assert_draws_as_pytorch(make, form)


@pytest.mark.usefixtures("allow_rnn")
def test_torch_compile_draws_once_in_a_checkpoint():
    assert_draws_as_pytorch(LAYERS["gru"], FORMS["three layers"], checkpointed=True)


@cases
def test_a_whole_step_drops_everything_between_layers(make, form):
    """Where everything is dropped no numbers are random, and later layers see zeros."""
    assert_same_training(Model(make, form, 1.0), [*torch.randn(2, 3, 2, 3)], EAGER, loss=0)


@cases
def test_inference_in_training_mode_draws_anew_each_time(make, form):
    x = torch.randn(3, 2, 3)
    losses = {}
    for dropout in (0.0, 0.5):
        model = Model(make, form, dropout)
        run = compile_inference(model, Options(engine="eager", seed=1))
        losses[dropout] = {run(x).item() for _ in range(4)}
    assert len(losses[0.0]) == 1
    assert len(losses[0.5]) == 4


def test_whatever_is_called_the_layer_is_kept():
    weights = [p.detach() for p in nn.GRU(3, 4, num_layers=2).parameters()]
    arguments = (torch.zeros(2, 2, 4), weights, True, 2, 1.0, True, False, False)
    x = torch.randn(5, 2, 3)
    expected = torch.gru(x, *arguments)
    for call in (
        lambda x: torch.gru(x, *arguments),
        lambda x: torch._VF.gru(x, *arguments),
        lambda x: torch.ops.aten.gru(x, *arguments),
        lambda x: torch.ops.aten.gru.input(x, *arguments),
    ):
        with pytest.warns(UserWarning, match="neither an input, a parameter nor a buffer"):
            torch.testing.assert_close(compile_inference(call, EAGER)(x), expected)


@pytest.mark.parametrize(
    "form", [{"num_layers": 1}, {"num_layers": 2, "dropout": 0.0}, {"num_layers": 2}]
)
def test_what_drops_nothing_is_left_whole(form):
    x = torch.randn(5, 2, 3)
    layer = nn.GRU(3, 4, **{"dropout": 0.5 if form["num_layers"] > 1 else 0.0, **form})
    if "dropout" not in form:
        layer.eval()
    expected, _ = layer(x)
    found, _ = compile_inference(layer, EAGER)(x)
    torch.testing.assert_close(found, expected.detach())


def test_a_whole_step_draws_anew_each_time():
    model = Model(LAYERS["gru"], FORMS["three layers"], 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = compile_training(model, optimizer, Options(engine="eager", seed=1), loss=0)
    assert len({run(torch.ones(3, 2, 3)).item() for _ in range(4)}) == 4


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 4)

    def forward(self, x):
        return self.layer(x)[0]


def test_the_notice_of_a_break_names_the_setting():
    model = nn.Sequential(nn.Linear(3, 3), Inner(), nn.Linear(4, 2))

    def run(x):
        return model[2](model[1](model[0](x)))

    x = torch.randn(5, 2, 3)
    with pytest.warns(UserWarning, match=r"allow_rnn = True lets it capture recurrent layers"):
        found = torch.compile(run, backend=ipu, options=EAGER)(x)
    torch.testing.assert_close(found, run(x))
    assert not torch._dynamo.config.allow_rnn


@pytest.fixture
def forgotten():
    """Nothing is compiled, and no user was warned."""
    torch._dynamo.reset()
    notices.forget()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("kind", [nn.Sequential, lambda *layers: layers[0]])
def test_a_layer_in_no_program_is_told_once_with_line_and_remedy(kind):
    model, x = kind(Inner(), nn.Linear(4, 2)), torch.randn(5, 2, 3)
    run = torch.compile(model, backend=ipu, options=EAGER)
    with pytest.warns(UserWarning, match="does not capture the recurrent layer") as told:
        torch.testing.assert_close([run(x), run(x)], [model(x), model(x)])
    (text,) = (str(one.message) for one in told if "recurrent" in str(one.message))
    place = f"test_recurrent_layers.py:{Inner.forward.__code__.co_firstlineno + 1}:"
    assert place in text
    assert "torch._dynamo.config.allow_rnn = True" in text


@pytest.mark.usefixtures("forgotten")
def test_a_bare_layer_is_told_with_the_line_of_its_call():
    run = torch.compile(nn.LSTM(3, 4), backend=ipu, options=EAGER)
    with pytest.warns(
        UserWarning, match=r"layer at test_recurrent_layers\.py:\d+: it runs"
    ) as told:
        run(torch.randn(5, 2, 3))
    assert told[0].filename == __file__
    assert f":{told[0].lineno}:" in str(told[0].message)


@pytest.mark.usefixtures("forgotten")
def test_other_calls_are_not_told_of_recurrent_layers():
    model, x = Inner(), torch.randn(5, 2, 3)

    def outside(x):
        return torch.compiler.disable(model)(x) + 1

    with warnings.catch_warnings(record=True, action="always") as told:
        torch.compile(model, backend="eager")(x)
        torch._dynamo.reset()
        explain(model, x, options=EAGER)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend=ipu, options=EAGER, fullgraph=True)(x)
        torch.compile(outside, backend=ipu, options=EAGER)(x)
        with torch._dynamo.config.patch(allow_rnn=True):
            torch._dynamo.reset()
            torch.compile(model, backend=ipu, options=EAGER)(x)
    assert not [one for one in told if "recurrent layer at" in str(one.message)]


@pytest.mark.usefixtures("forgotten")
def test_a_warning_that_is_an_error_is_logged(caplog):
    """Dynamo would take an error at the end of a compilation for one that never ends."""
    model, x = Inner(), torch.randn(5, 2, 3)
    with warnings.catch_warnings(action="error"):
        found = torch.compile(model, backend=ipu, options=EAGER)(x)
    torch.testing.assert_close(found, model(x))
    assert "does not capture the recurrent layer" in caplog.text
    torch._dynamo.reset()
