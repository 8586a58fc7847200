"""Check that gradients are added to accumulators by the products that make them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Block, Options, Strategy, compile_training
from ipu_dynamo.ops.accumulate import accumulate_matmul, accumulate_rows
from ipu_dynamo.passes.host.functions.accumulate_matmuls import plan
from ipu_dynamo.program import Copy, Program
from ipu_dynamo.testing import assert_same_bits

ROWS, WIDTH, WORDS = 8, 192, 1024
aten = torch.ops.aten


class Tied(nn.Module):
    """A table that is also the last layer, a layer, and a matrix whose transposed value is used."""

    def __init__(self, *, cut=False, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)
        self.cut = cut

    def forward(self, tokens, wanted):
        with Block("a", 0):
            h = self.layer(self.table(tokens)).tanh()
        with Block("b", 1 if self.cut else 0):
            h = h @ self.turned + F.linear(h, self.turned)
        with Block("c", 0):
            return F.cross_entropy(F.linear(h, self.table.weight), wanted)


def data(count):
    tokens = torch.randint(WORDS, (count * ROWS,), generator=torch.Generator().manual_seed(0))
    tokens[1::3] = tokens[0]  # rows that are read several times
    return tokens, tokens.roll(1)


def trained(model, count, **options):
    """The model after two steps of SGD with momentum, and what ran it."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.5)
    given = {"engine": "eager", "gradient_accumulation": count} | options
    step = compile_training(own, optimizer, Options(**given))
    for _ in range(2):
        step(*data(count))
    return own, step


def plainly(model, count):
    """The same in plain PyTorch."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for tokens, wanted in zip(*(x.split(ROWS) for x in data(count)), strict=True):
            (own(tokens, wanted) / count).backward()
        optimizer.step()
    return own


def inlined(step):
    return step.executable.host_program.inlined


def operators(step):
    return [node for function in inlined(step).functions for node in function.operators]


def assert_alike(ours, plain):
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        worst = (one - other).abs().max()
        assert worst <= 1e-5 * other.abs().max(), worst


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [None, 5])
def test_trains_like_pytorch(count, dtype, padding):
    model = Tied(padding=padding).to(dtype)
    ours, step = trained(model, count)
    assert_alike(ours, plainly(model, count))
    products = [n for n in operators(step) if n.target is accumulate_matmul]
    large = 1 if count == 1 else 4  # to store is worth it for the table only
    assert len(products) == large
    assert [n.args[1] for n in products] == [count > 1] * large
    assert any(n.target is accumulate_rows for n in operators(step))
    assert not any(n.target is aten.embedding_dense_backward.default for n in operators(step))
    assert all("test_accumulate_matmuls.py" in n.meta["stack_trace"] for n in products)
    assert Program.parse(step.program.text()) == step.program


@pytest.mark.few(1)
@pytest.mark.inductor
@pytest.mark.parametrize("count", [1, 3])
def test_inductor_adds_in_place(count):
    model = Tied()
    ours, _ = trained(model, count, engine="inductor")
    assert_alike(ours, plainly(model, count))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_table_that_a_stage_on_another_ipu_lies_between(workers):
    model = Tied(cut=True)
    options = {"strategy": Strategy(kind="pipelined"), "workers": workers}
    ours, step = trained(model, 7, **options)
    assert_alike(ours, plainly(model, 7))
    gradients = [i for i in step.program.walk() if isinstance(i, Copy) and "gradient of" in str(i)]
    assert len({i.result for i in gradients}) == len(gradients)


def test_outlined_blocks_add_to_one_accumulator_twice():
    class Deep(Tied):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, tokens, wanted):
            h = self.table(tokens)
            for block in self.blocks:
                h = h + block(h).tanh()
            return F.cross_entropy(F.linear(h, self.table.weight), wanted)

    model = Deep()
    ours, step = trained(model, 3, outline=True)
    table = [c.function for c in inlined(step).calls if "table.weight..grad" in c.arguments]
    assert len(set(table)) == 2
    plain = plainly(model, 3)
    assert_alike(ours, plain)
    whole, _ = trained(model, 3, outline=False)
    for one, other in zip(ours.parameters(), whole.parameters(), strict=True):
        assert_same_bits(one.detach(), other.detach())
    apart, _ = trained(model, 3, outline=True, side_by_side=True, workers=2)
    assert_alike(apart, plain)


def test_side_by_side_adds_the_same_for_any_number_of_workers():
    model = Tied()
    results = [trained(model, 5, side_by_side=True, workers=n)[0] for n in (1, 2, 3)]
    assert_alike(results[0], plainly(model, 5))
    for other in results[1:]:
        for a, b in zip(results[0].parameters(), other.parameters(), strict=True):
            assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("option", [{"floating_point_exceptions": True}, {"recompute": "all"}])
def test_with_other_rewrites(option):
    model = Tied()
    ours, _ = trained(model, 3, **option)
    assert_alike(ours, plainly(model, 3))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dims", [(1, -1), (0, 0), (0, 1), (-1, -2)])
def test_a_transpose_that_does_nothing_is_no_turn(dims, count):
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(400, 400) / 20)

        def forward(self, tokens, wanted):
            x = torch.nn.functional.one_hot(tokens % 400, 400).float()
            x = x * torch.arange(1.0, 401.0) / 400
            return F.cross_entropy(x @ self.w.transpose(*dims), wanted % 400)

    model = Square()
    ours, _ = trained(model, count)
    assert_alike(ours, plainly(model, count))


def test_what_is_read_elsewhere_or_small_stays():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, y):
            return F.mse_loss(self.layer(x), y)

    own = Small()
    step = compile_training(
        own,
        torch.optim.SGD(own.parameters(), lr=0.1),
        Options(engine="eager", gradient_accumulation=2),
    )
    step(torch.ones(4, 8), torch.ones(4, 8))
    assert not any(n.target is accumulate_matmul for n in operators(step))
    for function in inlined(step).functions:
        assert not plan(function.graph.graph)
