"""Check random numbers that are drawn by a value of the model."""

import math

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
    keyed_bernoulli,
    keyed_dropout,
    keyed_normal,
    keyed_randint,
    keyed_uniform,
    load,
    replica_index,
    save,
)

COUNT = 100_000
KEY = torch.tensor([3, 5])


def test_distributions_are_what_they_are_called():
    uniform = keyed_uniform(KEY, (COUNT,), -1.0, 3.0)
    assert -1.0 <= uniform.min() < -0.999
    assert 2.999 < uniform.max() < 3.0
    assert abs(uniform.mean() - 1.0) < 0.02
    assert abs(uniform.var() - 16 / 12) < 0.02
    normal = keyed_normal(KEY, (COUNT,), 2.0, 0.5)
    assert abs(normal.mean() - 2.0) < 0.01
    assert abs(normal.std() - 0.5) < 0.01
    assert abs(((normal - 2.0) / 0.5).abs().lt(1.0).float().mean() - math.erf(0.5**0.5)) < 0.01
    assert abs(keyed_bernoulli(KEY, 0.3, (COUNT,)).float().mean() - 0.3) < 0.01
    each = keyed_bernoulli(KEY, torch.tensor([0.0, 0.5, 1.0]).expand(COUNT, 3)).float().mean(0)
    assert each[0] == 0.0
    assert abs(each[1] - 0.5) < 0.01
    assert each[2] == 1.0
    counts = keyed_randint(KEY, -2, 3, (COUNT,)).add(2).bincount()
    assert len(counts) == 5
    assert bool(((counts / COUNT - 0.2).abs() < 0.01).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_no_uniform_number_is_rounded_to_the_end(dtype):
    drawn = keyed_uniform(KEY, (COUNT,), dtype=dtype)
    assert drawn.dtype == dtype
    assert drawn.max() < 1.0
    ends = keyed_uniform(KEY, (COUNT,), 1000.0, 1001.0, dtype=dtype)  # 2**-1 apart in half
    assert ends.dtype == dtype
    assert ends.min() >= 1000.0
    assert ends.double().max() < 1001.0


def test_every_bit_of_a_key_counts_and_no_draw_is_another_shifted():
    keys = [KEY, KEY.flip(0), *(KEY + torch.tensor(d) for d in ([0, 1], [1, 0], [0, 1 << 40]))]
    drawn = [keyed_randint(key, 0, 1 << 24, (1000,)) for key in keys]
    drawn.append(keyed_randint(KEY, 0, 1 << 24, (1000,), replica=torch.tensor(1)))
    for place, one in enumerate(drawn):
        for other in drawn[place + 1 :]:
            assert len(set(one.tolist()) & set(other.tolist())) < 5
    assert torch.equal(drawn[0], keyed_randint(KEY.int(), 0, 1 << 24, (1000,)))


class Drops(nn.Module):
    """Counts the key of its dropouts up, on one IPU or two; returns what they drew."""

    def __init__(self, ipus=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("first", torch.tensor([7, 0]))
        self.register_buffer("second", torch.tensor([8, 0]))
        self.ipus = ipus

    def forward(self, x):
        with Block("first", ipu_id=0):
            x = keyed_dropout(self.layers[0](x), 0.5, self.first)
            self.first[1] += 1
        with Block("second", ipu_id=self.ipus - 1):
            x = keyed_dropout(self.layers[1](x), 0.25, self.second)
            self.second[1] += 1
            return x, identity_loss(x.square(), "mean")


def trained(x, *, ipus=1, calls=1, **options):
    """What a model returns over some calls, and what it is in the end."""
    model = Drops(ipus)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"engine": "eager", "output_mode": "all", **options}
    run = compile_training(model, optimizer, options)
    outputs = [run(part)[0] for part in x.chunk(calls)]
    return torch.cat(outputs), model


def test_training_is_that_of_plain_torch():
    x = torch.randn(16, 16)
    drawn, model = trained(x, device_iterations=2, gradient_accumulation=4)
    theirs = Drops()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    expected = []
    for step in x.chunk(2):
        optimizer.zero_grad()
        for part in step.chunk(4):
            y, loss = theirs(part)
            (loss / 4).backward()
            expected.append(y.detach())
        optimizer.step()
    torch.testing.assert_close(drawn, torch.cat(expected))
    for mine, own in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-6, atol=1e-6)
    assert model.first.tolist() == [7, 8]


FORMS = [
    {"device_iterations": 4, "gradient_accumulation": 2},
    {"calls": 4, "gradient_accumulation": 2},
    {"ipus": 2, "device_iterations": 2, "calls": 2, "gradient_accumulation": 2},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_hang_on_calls_pipelines_or_workers(form, workers):
    x = torch.randn(32, 16)
    expected, _ = trained(x, calls=4, gradient_accumulation=2)
    more = {"strategy": Strategy("pipelined")} if form.get("ipus") == 2 else {}
    if more:
        form = {**form, "gradient_accumulation": 4, "device_iterations": 1}
        expected, _ = trained(x, calls=2, gradient_accumulation=4)
    drawn, _ = trained(x, workers=workers, **form, **more)
    assert torch.equal(drawn, expected)


def draws(options):
    """Two calls that draw each distribution, without any input that decides."""

    class Draw(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("key", torch.tensor([1, 0]))

        def forward(self, x):
            self.key[1] += 1
            uniform, normal = keyed_uniform(self.key, (3,)), keyed_normal(self.key, (3,))
            integers = keyed_randint(self.key, 0, 9, (3,))
            mask = keyed_bernoulli(self.key, 0.5, (3,))
            return uniform, normal, integers, mask, replica_index()

    run = compile_inference(Draw().eval(), options)
    x = torch.zeros(run.options.device_iterations * run.options.replicas, 1)
    return [torch.cat(both) for both in zip(*(run(x) for _ in range(2)), strict=True)]


def test_replicas_draw_apart_and_go_on_from_call_to_call():
    alone = draws({"engine": "eager", "device_iterations": 2})
    several = draws({"engine": "eager", "device_iterations": 2, "replicas": 2})
    assert several[4].tolist() == [0, 1] * 4
    for one, own in zip(alone[:4], several[:4], strict=True):
        rows = own.view(4, 2, 3)
        assert torch.equal(rows[:, 0].reshape(-1), one)
    for drawn in several[:2]:
        assert drawn.unique().numel() == drawn.numel()


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["compile_inference", "torch.compile"])
def test_inductor_draws_the_same(call):
    def draw(key, x):
        mask = keyed_bernoulli(key, 0.5, (4, 4))
        return keyed_uniform(key, (5,)), keyed_randint(key, 0, 1000, (5,)), mask, x * 2

    key, x = torch.tensor([1, 2]), torch.ones(2)
    expected = draw(key, x)
    if call == "torch.compile":
        made = torch.compile(draw, backend="ipu")(key, x)
    else:
        made = compile_inference(draw, Options(engine="inductor"))(key, x)
    for mine, own in zip(made, expected, strict=True):
        assert torch.equal(mine, own)


def test_gradients_are_those_of_the_mask():
    x = torch.randn(50, requires_grad=True, dtype=torch.float64)
    y = keyed_dropout(x, 0.25, KEY)
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0).double() / 0.75)
    mask = keyed_dropout(torch.ones(8, 4), 0.5, KEY, shape=(8, 1))
    assert bool((mask == mask[:, :1]).all())
    assert bool((keyed_dropout(x, 1.0, KEY) == 0).all())


def test_saved_programs_go_on(tmp_path):
    model = Drops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compile_training(model, optimizer, {"engine": "eager", "replicas": 2})
    x = torch.randn(8, 16)
    run(x)
    save(run, tmp_path / "file")
    loaded = load(tmp_path / "file")
    for mine, own in zip(loaded(x), run(x), strict=True):
        assert torch.equal(mine, own)
    assert ipu_dynamo.program.Program.parse(run.program.text()) == run.program


def test_a_loop_gets_the_index_from_outside():
    def forward(x, replica):
        def body(key, y):
            return key + 1, y + keyed_uniform(key, (2,), replica=replica)

        return ipu_dynamo.for_loop(3, body, (torch.tensor([1, 2]), x))[1]

    x = torch.zeros(2)
    y = compile_inference(lambda x: forward(x, replica_index()), {"engine": "eager"})(x)
    keys = [torch.tensor([1 + i, 2 + i]) for i in range(3)]
    torch.testing.assert_close(y, sum(keyed_uniform(key, (2,)) for key in keys))
    with pytest.raises(CompileError, match="asks for the index of its replica"):
        compile_inference(lambda x: forward(x, None), {"engine": "eager"})(x)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: keyed_uniform(torch.zeros(2), (1,)), "it is two integers"),
        (lambda: keyed_uniform(torch.zeros(3, dtype=torch.int64), (1,)), r"shape \[3\]"),
        (lambda: keyed_uniform(KEY, (1,), dtype=torch.int32), "of floating point"),
        (lambda: keyed_bernoulli(KEY, 0.5), "needs a shape"),
        (lambda: keyed_bernoulli(KEY, 1.5, (1,)), "from 0 to 1"),
        (lambda: keyed_randint(KEY, 0, 1 << 25, (1,)), "from 1 to 16777216 values"),
        (lambda: keyed_randint(KEY, 3, 3, (1,)), "values can be drawn"),
        (lambda: keyed_dropout(torch.ones(1), -0.1, KEY), "from 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
