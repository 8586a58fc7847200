"""Check that narrow types hold what wide ones held, and that nothing wide is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from ipu_dynamo import CompiledModel, Options, compile_inference, compile_training
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.precision.narrowing import NARROW
from ipu_dynamo.passes.traced.narrow_types import NarrowTypes
from ipu_dynamo.testing import assert_close
from tests.properties.evaluate import check

NARROWED = {"engine": "eager", "narrow": True}
RNG = torch.Generator().manual_seed(0)
X = torch.randn(4, 5, generator=RNG)
I = torch.randint(0, 4, (4,), generator=RNG)  # noqa: E741 (indices)
AT = torch.randint(0, 5, (4, 1), generator=RNG)


def changed_in_place(x, i):
    x, z = x.clone(), torch.zeros(4, dtype=torch.int64)
    z[i] = i
    z += 1
    z.scatter_(0, i, i)
    z.index_add_(0, i, i)
    x[i] = 0.0
    return x.index_fill_(0, i[:1], 3.0), z, x.masked_fill_(x > 1, 2.0)


CASES = {
    "argmax": (lambda x: (x.argmax(1), x.max(1), x.sort(1), x.topk(2), x.argsort(0)), X),
    "gather": (lambda x, at: (x.gather(1, at), x.scatter(1, at, 0.0), x.take(at)), X, AT),
    "losses": (lambda x, i: (F.cross_entropy(x, i), F.nll_loss(x, i, ignore_index=2)), X, I),
    "indexing": (lambda x, i: (x[i], x[i, i], x.index_select(0, i), x[torch.arange(3)]), X, I),
    "index_add": (lambda x, i: (x.index_add(0, i, x), x.index_put((i,), x)), X, I),
    "arange": (lambda x: (torch.arange(5) + x.long(), torch.arange(0, 1, 0.2).double()), X),
    "reductions": (lambda i: (i.cumsum(0), i.sum(), i.prod(), (i > 1).sum(), i.max()), I),
    "arithmetic": (lambda i: (i * 2, i // 2, i / 2, i % 3, -i, i**2, i.clamp(0, 2), ~i & 5), I),
    "one_hot": (lambda i: (F.one_hot(i, 5), F.one_hot(i, 5).float()), I),
    "embedding": (lambda i, x: (F.embedding(i, x), F.embedding_bag(i.view(2, 2), x)), I, X),
    "float64": (lambda x: (x.double() @ x.double().t(), torch.zeros(3).double() + x[0, 0]), X),
    "in place": (changed_in_place, X, I),
    "where": (lambda x, i: (torch.where(x > 0, 1, 0), torch.where(i > 1, i, 0), i.eq(2)), X, I),
    "constants": (
        lambda x: (torch.tensor([1, 2, 3]), torch.full((2,), 7), x.new_ones(2).long()),
        X,
    ),
    "views": (lambda i: (i.view(2, 2).t(), torch.cat([i, i]), torch.stack([i, i]), i.roll(1)), I),
    "parts": (lambda i: (i.unbind(0), i.split(2), i.flip(0), i.repeat(2), i[1:], i[..., None]), I),
    "search": (lambda x: torch.searchsorted(torch.arange(5.0), x), X),
    "promotion": (
        lambda i, x: (i.view(4, 1) + x, i * 1.5, i.to(x), i.type_as(x), i.double()),
        I,
        X,
    ),
    "shapes": (lambda x: (x.size(0) * torch.ones(2, dtype=torch.int64), torch.tensor(x.shape)), X),
    "wide input": (lambda x: (x * 2, x.sum(), torch.sin(x)), X.double()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_narrow_types_keep_values(case):
    model, *args = case
    expected = model(*(a.clone() for a in args))
    results = compile_inference(model, NARROWED)(*(a.clone() for a in args))
    leaves, spec = pytree.tree_flatten(results)
    assert spec == pytree.tree_structure(expected)
    for got, want in zip(leaves, pytree.tree_leaves(expected), strict=True):
        assert got.dtype == NARROW.get(want.dtype, want.dtype)
        assert_close(got.double(), want.double())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inputs_variables_and_results_are_narrow(case):
    model, *args = case
    capture = trace(model, read_arguments(model, args, {}), training=False)
    assert NarrowTypes(True)(capture)
    check(capture)
    for node in capture.returned:
        assert node.meta["val"].dtype not in NARROW
    for role, node in zip(capture.placeholders, capture.placeholder_nodes, strict=True):
        assert node.meta["val"].dtype not in NARROW, role


def test_bfloat16_is_computed_in_float16():
    def model(x):
        return x * 3, x.float(), x.masked_fill(x > 0, torch.finfo(torch.bfloat16).min)

    x = X.bfloat16()
    product, plain, masked = compile_inference(model, NARROWED)(x)
    assert_close(product, x.half() * 3)
    assert_close(plain, x.float())
    assert masked.min() == torch.finfo(torch.float16).min


def test_largest_number_of_a_wide_type_becomes_that_of_the_narrow():
    def model(x):
        top = torch.full((2,), torch.iinfo(torch.int64).max)
        return top, x.double().masked_fill(x > 0, torch.finfo(torch.float64).min)

    whole, real = compile_inference(model, NARROWED)(torch.ones(2))
    assert whole.tolist() == [2**31 - 1] * 2
    assert real.tolist() == [torch.finfo(torch.float32).min] * 2


def test_infinities_stay_infinite():
    def model(x):
        return x.double().masked_fill(x > 0, float("-inf"))

    assert compile_inference(model, NARROWED)(torch.ones(2)).tolist() == [float("-inf")] * 2


def test_pass_does_nothing_unless_wanted():
    capture = trace(torch.argmax, read_arguments(lambda x: x, (X,), {}), training=False)
    before = str(capture.graph.graph)
    assert not NarrowTypes(False)(capture)
    assert str(capture.graph.graph) == before


def test_wide_types_are_kept_without_the_option():
    def model(x):
        return x.double() / 3, x.argmax()

    real, index = compile_inference(model, {"engine": "eager"})(X)
    assert torch.equal(real, X.double() / 3)
    assert index.dtype == torch.int64


class Counting(nn.Module):
    """Integer and floating-point buffers that forward changes, and one that it reads."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.arange(5).flip(0))

    def forward(self, tokens, labels):
        self.calls += 1
        logits = self.head(self.norm(self.embedding(tokens)))[:, self.order]
        return F.cross_entropy(logits, labels), logits.argmax(1), self.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_in_narrow_types_is_that_in_float32(dtype):
    torch.manual_seed(0)
    ours, theirs = Counting().to(dtype), Counting()
    theirs.load_state_dict(ours.state_dict())
    adam = torch.optim.Adam(ours.parameters(), lr=0.1)
    step = CompiledModel(ours, Options(**NARROWED), optimizer=adam, own_weights=True)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    for _ in range(3):
        tokens, labels = torch.randint(0, 7, (6,)), torch.randint(0, 5, (6,))
        loss, best, _ = step(tokens, labels)
        expected, expected_best, _ = theirs(tokens, labels)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert_close(loss, expected.detach())
        assert torch.equal(best, expected_best.int())
    step.read_weights()
    for name, value in theirs.state_dict().items():
        if value.is_floating_point():
            assert_close(ours.state_dict()[name].float(), value, name, rtol=1e-4)


def test_integer_buffers_that_forward_writes_are_kept():
    model = Counting()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = CompiledModel(model, Options(**NARROWED), optimizer=sgd, own_weights=True)
    for count in range(1, 4):
        _, _, calls = step(torch.arange(6), torch.zeros(6, dtype=torch.int64))
        assert calls == count
    step.read_weights()
    assert model.calls == 3
    assert model.calls.dtype == torch.int64
    assert model.norm.num_batches_tracked == 0
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))
    kinds = {variable.name: variable.kind for variable in step.program.variables}
    assert (kinds["calls"], kinds["order"]) == ("buffer", "constant")


def test_a_wide_integer_buffer_cannot_be_shared_when_it_is_written():
    model = Counting()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), NARROWED)
    with pytest.raises(CompileError, match=r"buffer calls.*\n.*as a tensor of torch.int32"):
        step(torch.arange(6), torch.zeros(6, dtype=torch.int64))
