"""Check programs of recurrent models: their size, packed sequences, what passes do with them."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    CompileError,
    ExecutionError,
    Options,
    compile_inference,
    compile_training,
)
from ipu_dynamo.ops.recurrent.pairs import RECURRENT
from ipu_dynamo.program import Program
from ipu_dynamo.testing import assert_same_bits, assert_same_training

EAGER = {"engine": "eager"}
ENGINES = ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.examples(1)])]
KINDS = (nn.LSTM, nn.GRU, nn.RNN)


class Model(nn.Module):
    """Two recurrent layers, the second one perhaps on another IPU, on `[steps, batch, 3]`."""

    def __init__(self, kind=nn.LSTM, *, stages=1, detached=False, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.first = kind(3, 4, **settings)
        outputs = settings.get("proj_size") or 4
        self.second = kind(outputs * (1 + self.first.bidirectional), 4, **settings)
        self.detached = detached
        if stages > 1:
            BeginBlock(self.second, ipu_id=1)

    def forward(self, x):
        x, state = self.first(x)
        if self.detached:
            x, state = x.detach(), torch.zeros(())
        out, last = self.second(x, state if not self.detached else None)
        ends = last if isinstance(last, tuple) else (last,)
        return ipu_dynamo.identity_loss(out.square().mean() + sum(e.sum() for e in ends), "none")


def recurrent(program):
    """The operators of recurrent layers, in all functions."""
    return [n for f in program.functions for n in f.operators if n.target in RECURRENT]


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@pytest.mark.examples(5)
def test_trains_as_pytorch(engine, data):
    kind = data.draw(st.sampled_from(KINDS))
    settings = {
        "num_layers": data.draw(st.integers(1, 2)),
        "bidirectional": data.draw(st.booleans()),
        "bias": data.draw(st.booleans()),
        "batch_first": data.draw(st.booleans()),
    }
    if kind is nn.LSTM and data.draw(st.booleans()):
        settings["proj_size"] = 2
    stages = data.draw(st.integers(1, 2))
    model = Model(kind, stages=stages, **settings)
    options = Options(
        engine=engine,
        gradient_accumulation=data.draw(st.sampled_from((1, 2) if stages == 1 else (2, 4))),
        recompute=data.draw(st.sampled_from(("off", "all"))),
    )
    rows = options.gradient_accumulation * 2
    x = torch.randn(rows, rows, 3)
    run = assert_same_training(model, [x, x + 1], options)
    count = len(recurrent(run.program))
    assert count >= 2 * settings["num_layers"] * (1 + settings["bidirectional"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_does_not_grow_with_the_steps(kind):
    texts = []
    for steps in (3, 40):
        model = Model(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = compile_training(model, optimizer, EAGER)
        run(torch.randn(steps, 2, 3))
        texts.append(run.program.text())
        assert len(recurrent(run.program)) == 4
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())
    assert Program.parse(texts[0]).text() == texts[0]


def test_nothing_is_saved_for_what_is_not_trained():
    model = Model(detached=True)
    run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)
    run(torch.randn(3, 2, 3))
    saves = [node.args[-1] for node in recurrent(run.program) if node.target.name() == "ipu::lstm"]
    assert saves == [False, True]
    inference = compile_inference(Model(), EAGER)
    inference(torch.randn(3, 2, 3))
    assert [node.args[-1] for node in recurrent(inference.program)] == [False, False]


def test_a_saved_program_goes_on_with_the_same_bits(tmp_path):
    model = Model(num_layers=2, dropout=0.5, bidirectional=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = compile_training(model, optimizer, Options(engine="eager", seed=1))
    x = torch.randn(5, 2, 3)
    run(x)
    ipu_dynamo.save(run, tmp_path / "saved")
    loaded = ipu_dynamo.load(tmp_path / "saved")
    assert loaded.program == run.program
    assert_same_bits(loaded(x), run(x))


@pytest.mark.parametrize("kind", KINDS)
def test_half_layers_are_near_those_of_float32(kind):
    model = Model(kind, num_layers=2)
    x = torch.randn(6, 3, 3).half()
    half = copy.deepcopy(model).half()
    expected = copy.deepcopy(half).float()(x.float())
    for rounding in (False, True):
        options = Options(engine="eager", stochastic_rounding=rounding, seed=1, partials="half")
        run = compile_training(half, torch.optim.SGD(half.parameters(), lr=0.0), options)
        torch.testing.assert_close(run(x).float(), expected, rtol=1e-2, atol=1e-2)


def test_stochastic_rounding_rounds_what_layers_return():
    layer = nn.GRU(3, 4).half()
    x = torch.randn(6, 3, 3).half()
    run = compile_inference(layer, Options(engine="eager", stochastic_rounding=True, seed=1))
    draws = torch.stack([run(x)[0].float() for _ in range(64)])
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()(x.double())[0]
    assert (draws != draws[0]).any()
    error, step = (draws.mean(0) - exact).abs(), 2.0**-11
    assert (error < step).all()  # each draw is off by a step, their mean by far less
    assert error.mean() < step / 5


class PackedModel(nn.Module):
    """A layer on sequences of different lengths; `use` says what becomes of its packed output."""

    def __init__(self, kind=nn.LSTM, use="unpack", total=None, is_sorted=False, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(3, 4, **settings)
        self.use, self.total, self.is_sorted = use, total, is_sorted

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=self.is_sorted)
        if self.use == "rows":
            return packed.data.mean()
        if self.use == "sizes":
            return x * packed.batch_sizes.sum()
        packed, last = self.layer(packed)
        if self.use == "return":
            return packed
        out, again = pad_packed_sequence(packed, total_length=self.total, padding_value=0.5)
        ends = last if isinstance(last, tuple) else (last,)
        loss = out.square().mean() + sum(e.sum() for e in ends) + again.sum()
        return ipu_dynamo.identity_loss(loss, "none"), out


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@pytest.mark.examples(5)
def test_packed_sequences_train_as_pytorch(engine, data):
    kind = data.draw(st.sampled_from(KINDS))
    settings = {
        "num_layers": data.draw(st.integers(1, 2)),
        "bidirectional": data.draw(st.booleans()),
    }
    total = data.draw(st.sampled_from((None, 5, 7)))
    model = PackedModel(kind, total=total, **settings)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2))
    lengths = torch.tensor([*lengths, 5 if total is None else 3])
    assert_same_training(model, [(torch.randn(5, 3, 3), lengths)], {"engine": engine}, loss=0)


def test_sequences_packed_inside_are_those_of_pytorch():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 4)

        def forward(self, x):
            packed = pack_sequence([x[:2], x, x[1:4]], enforce_sorted=False)
            return pad_packed_sequence(self.layer(packed)[0])

    model, x = Inside(), torch.randn(5, 3)
    expected = model(x)
    found = compile_inference(model, EAGER)(x)
    torch.testing.assert_close(found[0], expected[0].detach())
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        ("rows", "rows of a packed sequence are known only when the model runs"),
        ("sizes", "rows of a packed sequence are known only when the model runs"),
        ("return", "returns a packed sequence, whose length is known only when it runs"),
    ],
)
def test_what_would_take_padding_for_data_is_refused(use, problem):
    with pytest.raises(CompileError, match=problem) as refused:
        compile_inference(PackedModel(use=use), EAGER)(torch.randn(5, 2, 3), torch.tensor([5, 2]))
    if use != "return":
        assert "test_recurrent_programs.py" in str(refused.value)


@pytest.mark.parametrize(
    ("lengths", "settings", "problem"),
    [
        ([5, 0], {}, "lengths have to be from 1 to 5"),
        ([6, 5], {}, "lengths have to be from 1 to 5"),
        ([3, 5], {"is_sorted": True}, "the longest sequence has to be first"),
        ([4, 2], {}, "no sequence has all 5 steps"),
    ],
)
def test_lengths_are_checked_as_the_program_runs(lengths, settings, problem):
    model, x = PackedModel(**settings), torch.randn(5, 2, 3)
    run = compile_inference(model, EAGER)
    good = torch.tensor([5, 2])
    expected = model(x, good)[1].detach()
    torch.testing.assert_close(run(x, good)[1], expected)
    with pytest.raises(ExecutionError, match=problem) as refused:
        run(x, torch.tensor(lengths))
    assert "pack" in str(refused.value).partition("from:")[2]
    torch.testing.assert_close(run(x, good)[1], expected)


def test_a_packed_sequence_of_elsewhere_is_refused():
    packed = pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 2]))
    with pytest.raises(CompileError, match="the value of a tensor"):
        compile_inference(nn.LSTM(3, 4), EAGER)(packed)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_the_types_of_pytorch(kind):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(3, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x)[0]

    model, x = Cast(), torch.randn(5, 2, 3)
    try:
        expected = model(x).detach()
    except RuntimeError as error:
        # oneDNN has no bfloat16 LSTM for processors without AVX-512 and raises there.
        if "LSTM forward propagation primitive" not in str(error):
            raise
        expected = model.layer(x)[0].detach().bfloat16()
    found = compile_inference(model, EAGER)(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_torch_compile_split_the_batch(kind):
    model = nn.Sequential()
    model.layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    plain = copy.deepcopy(model.layer)
    x = torch.randn(4, 5, 3)
    with torch._dynamo.config.patch(allow_rnn=True):
        options = {**EAGER, "micro_batches": 2}
        run = torch.compile(model.layer, backend="ipu", fullgraph=True, options=options)
        out, _ = run(x)
    out.square().sum().backward()
    expected, _ = plain(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for one, other in zip(model.layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
