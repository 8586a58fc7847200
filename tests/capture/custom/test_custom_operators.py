"""Check operators that users register a function for."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import CompileError, Options, custom_operator, register_custom_operator
from ipu_dynamo.capture.custom import custom_operators

X = torch.tensor([[1.0, -2.0], [3.0, -4.0]])


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(custom_operators, "_known", dict(custom_operators._known))


class Cubed(nn.Module):
    """A weight, and a custom operator between it and the loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        y, z = custom_operator([x * self.weight], "Cube", "tests", 1, attributes={"factor": 2.0})
        return y, (y + z).sum()


def cube(x, factor):
    return x**3 * factor, x


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    return ipu_dynamo.compile_training(model, optimizer, Options(engine="eager"), loss=1)


def test_autograd_differentiates_a_registered_function():
    register_custom_operator(cube, name="Cube", domain="tests")
    model = Cubed()
    y, _ = trained(model)(X)
    assert torch.equal(y, X**3 * 2)
    expected = 1 - 0.25 * (6 * X**3 + X).sum(0)
    assert torch.allclose(model.weight, expected)


def test_a_gradient_of_its_own_counts():
    def gradient(gradients, inputs, results, factor):
        assert results[0].shape == X.shape
        return (gradients[0] * inputs[0] * factor * 10,)

    register_custom_operator(cube, name="Cube", domain="tests", gradient=gradient)
    model = Cubed()
    trained(model)(X)
    assert torch.allclose(model.weight, 1 - 0.25 * (20 * X * X).sum(0))


def test_the_last_registration_counts_at_the_next_trace():
    for number in (2.0, 3.0):
        register_custom_operator(lambda x, n=number: x * n, name="Times", domain="tests")
        compiled = ipu_dynamo.compile_inference(
            lambda x: custom_operator([x], "Times", "tests", 1)[0], Options(engine="eager")
        )
        assert torch.equal(compiled(X), X * number)


def test_an_operator_without_a_function_is_an_error_that_says_how_to_register_it():
    compiled = ipu_dynamo.compile_inference(
        lambda x: custom_operator([x], "Cube", "elsewhere", 2), Options(engine="eager")
    )
    with pytest.raises(CompileError) as caught:
        compiled(X)
    text = str(caught.value)
    assert "elsewhere.Cube, version 2, has no implementation" in text
    assert "register_custom_operator(function, name='Cube', domain='elsewhere', version=2)" in text
    assert 'custom_operator([x], "Cube", "elsewhere", 2)' in text


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([X], "has 2 results, but example_outputs 1"),
        ([X, X[0]], r"result 1 is float32\[2, 2\], and example_outputs says float32\[2\]"),
        ([X.int(), X], r"result 0 is float32\[2, 2\], and example_outputs says int32\[2, 2\]"),
    ],
)
def test_results_have_to_be_like_the_examples(examples, problem):
    register_custom_operator(lambda x: (x, x.clone()), name="Two", domain="tests")
    with pytest.raises(CompileError, match=problem):
        custom_operator([X], "Two", "tests", 1, example_outputs=examples)


def test_a_program_with_a_custom_operator_is_saved_without_its_python(tmp_path):
    register_custom_operator(lambda x: (x.relu(), x * 2), name="Two", domain="tests")
    compiled = ipu_dynamo.compile_inference(
        lambda x: custom_operator([x], "Two", "tests", 1), Options(engine="eager")
    )
    expected = compiled(X)
    ipu_dynamo.save(compiled, tmp_path / "program")
    custom_operators._known.clear()
    assert all(map(torch.equal, ipu_dynamo.load(tmp_path / "program")(X), expected))


def test_torch_compile_takes_custom_operators(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    register_custom_operator(cube, name="Cube", domain="tests")
    model = Cubed()
    y, loss = torch.compile(model, backend="ipu", fullgraph=True)(X)
    loss.backward()
    assert torch.equal(y, X**3 * 2)
    assert torch.allclose(model.weight.grad, (6 * X**3 + X).sum(0))
