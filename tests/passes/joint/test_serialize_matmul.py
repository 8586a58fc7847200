"""Check that serialised products are what `torch.matmul` computes, part by part, in order."""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import CompileError, Options, compile_inference, compile_training, serialized_matmul
from ipu_dynamo.ops.marks.serialized import MODES, serialized_matmul_op
from ipu_dynamo.ops.parts import parts
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.testing import assert_close, assert_same_bits
from ipu_dynamo.torch_compile.backend import ipu
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs
from tests.properties.running import EAGER_FIRST

EAGER = {"engine": "eager"}


class Product(nn.Module):
    """A serialised product of two parameters' functions, of which every element counts.

    Args:
        left, right: shapes.
    """

    def __init__(self, left, right, mode, factor, *, dtype=torch.float64, keep_precision=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.left = nn.Parameter(torch.randn(left, generator=generator).to(dtype))
        self.right = nn.Parameter(torch.randn(right, generator=generator).to(dtype))
        self.settings = mode, factor, keep_precision

    def forward(self, x):
        product = serialized_matmul(self.left * x, self.right + x, *self.settings)
        return product, product.sin().sum()


@st.composite
def products(draw):
    """A product in any mode, with batches on both sides, on one, or on none."""
    m, n, p = (draw(st.integers(1, 6)) for _ in range(3))
    batch = draw(st.sampled_from([(), (2,), (3, 1), (2, 2)]))
    other = draw(st.sampled_from([(), batch]))
    mode = draw(st.sampled_from(MODES))
    size = {"input_channels": m, "reducing_dim": n, "output_channels": p}[mode]
    return Product((*batch, m, n), (*other, n, p), mode, draw(st.integers(1, size)))


@given(products())
def test_keeps_values_and_metadata(model):
    data = (torch.tensor(0.7, dtype=torch.float64),)
    inputs = named_inputs(model, data)
    options = Options()
    model.forward = _marked(model.forward)
    capture, one = captured(model, data, options, before="SerializeMatmul")
    before, lines = evaluate(capture, inputs), lines_of(capture.graph.graph.nodes)
    assert one(capture)
    note(str(capture.graph.graph))
    check(capture)
    assert_close(evaluate(capture, inputs), before, rtol=1e-12, atol=1e-12)
    assert lines_of(capture.graph.graph.nodes) <= lines
    assert not capture.graph.graph.find_nodes(op="call_function", target=serialized_matmul_op)
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


def _marked(forward):
    """`forward`, with its sum as the loss."""

    def run(x):
        product, total = forward(x)
        return product, torch.nn.functional.l1_loss(total, total.detach() - 1, reduction="sum")

    return run


@pytest.mark.parametrize("engine", EAGER_FIRST)
@given(products())
def test_trains_as_plain_pytorch(engine, model):
    x = torch.tensor([0.7], dtype=torch.float64)
    product, loss = model(x)
    loss.backward()
    wanted = [(p - 0.5 * p.grad).detach() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = compile_training(model, optimizer, {"engine": engine}, loss=1)
    assert_close(step(x), (product, loss), rtol=1e-11, atol=1e-11)
    assert_close([p.detach() for p in model.parameters()], wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", [None, ipu], ids=["eager", "ipu"])
def test_is_the_plain_product_outside_a_program_and_under_torch_compile(mode, backend, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    model = Product((3, 6, 4), (4, 8), mode, 2)
    x = torch.tensor([0.7], dtype=torch.float64)
    called = torch.compile(model, backend=backend, fullgraph=True) if backend is not None else model
    product, total = called(x)
    total.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wanted = (model.left * x) @ (model.right + x)
    wanted.sin().sum().backward()
    assert_close(product, wanted, rtol=1e-12)
    assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-12, atol=1e-12)


def sums_of_halves(parts_of_product):
    """Parts added up in order, each sum rounded."""
    total = parts_of_product[0]
    for part in parts_of_product[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("keep_precision", [False, True])
def test_sums_run_in_order_and_in_the_wanted_precision(keep_precision):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).half() for shape in ((8, 64), (64, 8)))

    def model(a, b):
        return serialized_matmul(a, b, "reducing_dim", 16, keep_precision)

    result = compile_inference(model, EAGER)(a, b)
    slices = [(a[:, i:j], b[i:j]) for i, j in parts(64, 16)]
    if keep_precision:
        wanted = sums_of_halves([p.float() @ q.float() for p, q in slices]).half()
    else:
        wanted = sums_of_halves([p @ q for p, q in slices])
    assert_same_bits(result, wanted)


@pytest.mark.parametrize(
    ("mode", "operators"),
    [
        ("input_channels", {"mm": 6, "cat": 2, "add": 1}),
        ("reducing_dim", {"mm": 6, "add": 1, "cat": 2}),
        ("output_channels", {"mm": 6, "cat": 2, "add": 1}),
    ],
)
def test_the_program_shows_the_parts(mode, operators):
    """Two parts of each of three products; two of these are joined, one is added up."""
    model = Product((4, 6), (6, 8), mode, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = compile_training(model, optimizer, EAGER, loss=1)
    step.compile(torch.zeros(1, dtype=torch.float64))
    (function,) = step.program.functions
    names = [str(node.target).split(".")[1] for node in function.operators]
    found = {name: names.count(name) for name in operators}
    model = Product((4, 6), (6, 8), "none", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = compile_training(model, optimizer, EAGER, loss=1)
    plain.compile(torch.zeros(1, dtype=torch.float64))
    others = [str(n.target).split(".")[1] for n in plain.program.functions[0].operators]
    assert found == {
        name: count + others.count(name) * (name == "add") for name, count in operators.items()
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sideways", 2), "no mode 'sideways'"),
        (("output_channels", 0), "in 0 parts"),
        (("output_channels", 9), "a dimension of 8 in 9 parts"),
        (("input_channels", 5), "a dimension of 4 in 5 parts"),
    ],
)
def test_refuses_what_cannot_be_split(arguments, message):
    model = Product((4, 6), (6, 8), *arguments)
    with pytest.raises(CompileError, match=message) as raised:
        compile_inference(model, EAGER)(torch.zeros(1, dtype=torch.float64))
    assert "test_serialize_matmul.py" in str(raised.value)
    assert "try:" in str(raised.value)


@given(st.integers(0, 40), st.integers(1, 12))
def test_parts_cover_a_dimension_in_order(size, count):
    bounds = parts(size, count)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(size))
    widths = [stop - start for start, stop in bounds]
    assert len(bounds) == count
    assert max(widths) - min(widths) <= 1
