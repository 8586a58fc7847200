"""Check the two passes that decide how halves are multiplied: in float32, or with half partials."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Block, Options, compile_inference, compile_training
from ipu_dynamo.capture.capture import STAGE
from ipu_dynamo.ops.marks.markers import identity_loss
from ipu_dynamo.ops.precision import half_partial_sums as ops
from ipu_dynamo.passes.joint.precision.upcast_half_matmuls import PRODUCTS
from ipu_dynamo.passes.level_text import write_level
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs

PASSES = ["UpcastHalfMatmuls", "HalfPartials"]
HALF = Options(partials="half", convolution_partials="half", partials_chunk=16)


class Net(nn.Module):
    """Every kind of product, on two stages; `spread` sets the channels and the transposition."""

    def __init__(self, spread=1, *, transposed=False):
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.conv = kind(2, 2 * spread, (3, 2), stride=(2, 1), padding=(1, 0), groups=2)
        self.plain = nn.Conv1d(2 * spread, 2, 2, bias=False)
        self.fc = nn.Linear(2, 3)
        self.half()

    def forward(self, x):
        with Block("a", 0):
            h = self.plain(self.conv(x).clamp(-2, 2).flatten(2)[..., :20]).clamp(-2, 2)
            h = h.mT.to(memory_format=torch.contiguous_format)
        with Block("b", 1):
            y = self.fc(h).clamp(-2, 2)
            squares = torch.baddbmm(y.new_ones(1, 3, 3), y.mT, y, beta=2, alpha=0.5)
            inner = torch.mv(squares[0].clamp(-2, 2), y[0, 0]) + torch.dot(y[0, 0], y[0, 1])
            return y, squares, identity_loss(inner, "sum")


def whole_numbers(model, seed):
    """Make all weights small integers, so that half arithmetic is exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model, torch.randint(-1, 2, (2, 2, 5, 4), generator=generator).half()


@pytest.mark.few(1)
@pytest.mark.examples(8)
@pytest.mark.parametrize("name", PASSES)
@given(
    spread=st.integers(1, 2),
    transposed=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_keeps_values_metadata_and_graph(name, spread, transposed, training, seed):
    model, x = whole_numbers(Net(spread, transposed=transposed), seed)
    options = HALF if name == "HalfPartials" else Options()
    capture, one = captured(model, (x,), options, training=training, before=name)
    inputs, nodes = named_inputs(model, (x,)), list(capture.graph.graph.nodes)
    before = evaluate(capture, inputs)
    assert one(capture), "there is something to do"
    check(capture)
    after = evaluate(capture, inputs)
    assert before.keys() == after.keys()
    assert max(value.abs().max() for value in before.values()) < 1024  # all is exact
    assert {key: torch.equal(after[key], before[key]) for key in before} == dict.fromkeys(
        before, True
    )
    operators = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    assert all(
        n.meta.get("stack_trace") and STAGE in n.meta for n in operators if n.all_input_nodes
    )
    assert lines_of(operators) <= lines_of(nodes)
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


def test_products_of_halves_are_computed_in_float32():
    model, x = whole_numbers(Net(), 0)
    capture, _ = captured(model, (x,))
    products = [n for n in capture.graph.graph.nodes if n.target in PRODUCTS]
    assert len(products) > 10
    for node in products:
        for source in node.all_input_nodes:
            assert source.meta["val"].dtype == torch.float32


@pytest.mark.parametrize("beta", [0, 1, 2])
def test_every_product_can_have_half_partials(beta):
    class Sums(nn.Module):
        def forward(self, a, b, v, bias):
            summed = torch.addbmm(bias, a, b, beta=beta, alpha=2)
            return summed, torch.addmv(bias[0], a[0], v, beta=beta, alpha=2)

    arguments = [torch.randint(-2, 3, s).half() for s in ((3, 4, 40), (3, 40, 4), (40,), (4, 4))]
    capture, _ = captured(Sums(), tuple(arguments), HALF, training=False)
    targets = [n.target for n in capture.graph.graph.nodes]
    assert not PRODUCTS & set(targets)
    assert targets.count(ops.matmul) == 2
    found = compile_inference(Sums(), Options(engine="eager", partials="half"))(*arguments)
    for ours, theirs in zip(found, Sums()(*(t.double() for t in arguments)), strict=True):
        assert torch.equal(ours.double(), theirs)


def test_other_types_are_left_alone():
    model = nn.Linear(3, 2)
    capture, one = captured(model, (torch.ones(1, 3),), training=False, before="UpcastHalfMatmuls")
    assert not one(capture)


def test_float32_does_not_travel_between_stages():
    model, x = whole_numbers(Net(), 0)
    program = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), _eager())
    program(x)
    assert program.program.copies
    assert {str(copy.type.dtype) for copy in program.program.copies} == {"torch.float16"}


@pytest.mark.parametrize("transposed", [False, True])
def test_half_partials_reach_forward_and_backward(transposed):
    model, x = whole_numbers(Net(transposed=transposed), 0)
    capture, _ = captured(model, (x,), HALF)
    targets = [n.target for n in capture.graph.graph.nodes]
    assert not PRODUCTS & set(targets)
    assert {ops.conv, ops.conv_input, ops.conv_weight} <= set(targets)
    assert targets.count(ops.matmul) > 5


@pytest.mark.parametrize("partials", ["float", "half"])
def test_partials_of_products_and_convolutions_are_apart(partials):
    model, x = whole_numbers(Net(), 0)
    other = {"float": "half", "half": "float"}[partials]
    options = Options(partials=partials, convolution_partials=other)
    capture, _ = captured(model, (x,), options)
    targets = {n.target for n in capture.graph.graph.nodes}
    assert (ops.matmul in targets) == (partials == "half")
    assert (ops.conv in targets) == (other == "half")


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("chunk", [16, 64])
def test_inference_equals_the_chunked_sum(engine, chunk):
    torch.manual_seed(0)
    model = nn.Linear(200, 5).half()
    x = torch.randn(3, 200).half()
    options = Options(engine=engine, partials="half", partials_chunk=chunk)
    found = compile_inference(model, options)(x)
    total = torch.zeros(3, 5, dtype=torch.float16)
    for at in range(0, 200, chunk):
        a, w = x[:, at : at + chunk].float(), model.weight[:, at : at + chunk].float()
        total += (a @ w.T).half()
    torch.testing.assert_close(found, total + model.bias.detach(), rtol=2e-3, atol=2e-3)
    assert not torch.equal(
        found, F.linear(x.float(), model.weight.float(), model.bias.float()).half()
    )


def _eager():
    return Options(engine="eager")
