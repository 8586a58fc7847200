"""Check loops and branches through torch.compile."""

import copy

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import ipu_dynamo
from tests.control_flow.models import Loss, inputs, net

ALL = ("for_loop", "cond", "torch.cond", "scan of floats", "map")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("engine", "forms"),
    [
        ("eager", ALL),
        ("eager", ("while_loop", "nested", "scan")),
        ("inductor", ("scan of floats",)),
    ],
)
def test_inference_computes_what_python_does(engine, forms):
    model = net(*forms)
    run = torch.compile(model, backend="ipu", fullgraph=True, options={"engine": engine})
    with torch.no_grad():
        for x in inputs():
            torch.testing.assert_close(run(x), model.plain(x))
    assert any(f.name.startswith("body_") for p in ipu_dynamo.programs() for f in p.functions)


@pytest.mark.few(1)
@pytest.mark.parametrize(("engine", "forms"), [("eager", ALL), ("inductor", ("scan of floats",))])
def test_gradients_are_what_python_computes(engine, forms):
    model = Loss(net(*forms))
    other = Loss(copy.deepcopy(model.model), plain=True)
    run = torch.compile(model, backend="ipu", fullgraph=True, options={"engine": engine})
    for x in inputs(2):
        given = [x.clone().requires_grad_() for _ in range(2)]
        losses = [run(given[0]), other(given[1])]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*[x.grad for x in given])
        torch.testing.assert_close(*[[p.grad for p in m.parameters()] for m in (model, other)])


def test_draws_are_the_generators():
    def forward(x):
        return ipu_dynamo.for_loop(3, lambda a: a + torch.rand(2), [x])[0]

    run = torch.compile(forward, backend="ipu", options={"engine": "eager"})
    torch.manual_seed(0)
    drawn = run(torch.zeros(2))
    torch.manual_seed(0)
    assert torch.equal(drawn, sum(torch.rand(2) for _ in range(3)))


def test_a_while_loop_is_not_trained():
    w = torch.ones(2, requires_grad=True)

    @torch.compile(backend="ipu", options={"engine": "eager"})
    def forward(x):
        return torch.while_loop(lambda y: y.sum() < 9, lambda y: (y + w,), (x,))[0]

    with pytest.raises(ipu_dynamo.CompileError, match="a while_loop has no gradient"):
        forward(torch.ones(2))


@pytest.mark.parametrize("writer", ["condition", "body"])
def test_a_write_to_a_tensor_from_outside_is_refused_with_its_line(writer):
    @torch.compile(backend="ipu", options={"engine": "eager"})
    def forward(x):
        count = x.sum() + 0

        def condition(i, y):
            if writer == "condition":
                count.add_(1)
            return i < 3

        def body(i, y):
            if writer == "body":
                count.add_(1)
            return i + 1, y * 2

        y = while_loop(condition, body, (torch.tensor(0), x))[1]
        return y, count

    with torch.no_grad(), pytest.raises(ipu_dynamo.CompileError) as caught:
        forward(torch.ones(2))
    assert "changes a tensor from outside in place" in str(caught.value)
    assert "count.add_(1)" in str(caught.value)
