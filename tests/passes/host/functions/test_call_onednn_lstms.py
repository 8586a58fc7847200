"""Check that oneDNN's LSTM layers compute what the operators of programs do, where they may."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ipu_dynamo
from ipu_dynamo import BeginBlock, Options, compile_training
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.ops.recurrent.onednn_lstm import onednn_lstm, onednn_lstm_backward
from ipu_dynamo.passes.host.functions.call_onednn_lstms import CallOnednnLstms
from ipu_dynamo.testing import assert_same_training

OURS, ONEDNN = {lstm, lstm_backward}, {onednn_lstm, onednn_lstm_backward}
WITHOUT = ("CallOnednnLstms",)


class Model(nn.Module):
    """Two layers, of which the second perhaps lies on another IPU."""

    def __init__(self, *, stages=1, packed=False, uses=("out", "state"), **settings):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(3, 4, **settings)
        outputs = settings.get("proj_size") or 4
        self.second = nn.LSTM(outputs * (1 + self.first.bidirectional), 4, **settings)
        self.packed, self.uses = packed, uses
        if stages > 1:
            BeginBlock(self.second, ipu_id=1)

    def forward(self, x):
        lengths = torch.full((x.shape[1],), len(x), dtype=torch.int64)
        x, state = self.first(pack_padded_sequence(x, lengths) if self.packed else x)
        out, (h, c) = self.second(x, state)
        out = pad_packed_sequence(out)[0] if self.packed else out
        loss = h.new_zeros(())
        if "out" in self.uses:
            loss = loss + out.square().mean()
        if "state" in self.uses:
            loss = loss + h.sum() - c.square().sum()
        return ipu_dynamo.identity_loss(loss, "none")


def called(run):
    """The LSTM operators of what runs here."""
    functions = run.executable.host_program.inlined.functions
    return [n.target for f in functions for n in f.operators if n.target in OURS | ONEDNN]


@pytest.mark.examples(5)
@given(data=st.data())
def test_values_are_those_of_pytorch_and_of_the_operators_of_programs(data):
    settings = {
        "num_layers": data.draw(st.integers(1, 2)),
        "bidirectional": data.draw(st.booleans()),
        "bias": data.draw(st.booleans()),
        "batch_first": data.draw(st.booleans()),
    }
    uses = data.draw(st.sampled_from((("out",), ("state",), ("out", "state"))))
    model = Model(uses=uses, **settings)
    x = torch.randn(3, 4, 3)
    ways = {}
    for without in ((), WITHOUT):
        options = Options(engine="eager", without=without, gradient_accumulation=1)
        run = assert_same_training(
            model, [x, x.transpose(0, 1).contiguous().transpose(0, 1)], options
        )
        ways[without] = set(called(run))
    assert ways == {(): ONEDNN, WITHOUT: OURS}


@pytest.mark.inductor
def test_inductor_calls_it():
    x = torch.randn(3, 4, 3)
    run = assert_same_training(Model(bidirectional=True), [x, x + 1], {"engine": "inductor"})
    assert set(called(run)) == ONEDNN


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"proj_size": 2}, torch.float32),
        ({"packed": True}, torch.float32),
        ({}, torch.float64),
        ({}, torch.float16),
    ],
    ids=str,
)
def test_what_it_does_not_have_stays(settings, dtype):
    model = Model(**settings).to(dtype)
    run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), {"engine": "eager"})
    run(torch.randn(3, 2, 3).to(dtype))
    assert set(called(run)) == OURS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [onednn_lstm, onednn_lstm_backward]),
        ({"recompute": "all"}, [onednn_lstm, onednn_lstm_backward]),
        ({"without": ("RepeatLstms",)}, [lstm_backward]),
    ],
    ids=str,
)
def test_backward_of_another_function_runs_a_layer_again(settings, expected):
    """The first stage's backward pass is a function of its own; gates that enter it stay."""
    model = Model(stages=2)
    options = Options(engine="eager", gradient_accumulation=4, **settings)
    run = assert_same_training(model, [torch.randn(12, 2, 3)] * 2, options)
    (backward,) = (
        f for f in run.executable.host_program.inlined.functions if f.name == "backward0"
    )
    assert [node.target for node in backward.operators if node.target in OURS | ONEDNN] == expected


def test_a_second_run_changes_nothing():
    model = Model()
    run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), {"engine": "eager"})
    run(torch.randn(3, 2, 3))
    assert CallOnednnLstms()(run.executable.host_program) is False
