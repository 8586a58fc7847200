"""Check the operators of recurrent layers against PyTorch's layers, over all their options."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import flop_registry

from ipu_dynamo.capture.layers.recurrent_layers import RecurrentLayers
from ipu_dynamo.ops.recurrent.pairs import RECURRENT, SAVED

TOLERANCE = {  # of the largest element
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
sizes = st.integers(1, 4)


@st.composite
def layers(draw):
    """A recurrent layer in float64, how it is called, and in which type it is to compute."""
    kind = draw(st.sampled_from(("LSTM", "GRU", "RNN")))
    settings = {
        "num_layers": draw(st.integers(1, 2)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
    }
    inputs, cells = draw(sizes), draw(st.integers(2, 4))
    if kind == "LSTM" and draw(st.booleans()):
        settings["proj_size"] = draw(st.integers(1, cells - 1))
    if kind == "RNN":
        settings["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")))
    torch.manual_seed(draw(st.integers(0, 3)))
    layer = getattr(nn, kind)(inputs, cells, **settings).double()
    for parameter in layer.parameters():
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
    return layer, draw(st.sampled_from(list(TOLERANCE)))


@st.composite
def calls(draw, layer):
    """Input, states or None, and lengths or None."""
    steps, batch = draw(st.integers(1, 5)), draw(sizes)
    x = torch.randn(steps, batch, layer.input_size).double()
    count = layer.num_layers * (1 + layer.bidirectional)
    outputs = getattr(layer, "proj_size", 0) or layer.hidden_size
    states = [torch.randn(count, batch, size).double() for size in (outputs, layer.hidden_size)]
    lengths = st.lists(st.integers(1, steps), min_size=batch, max_size=batch)
    lengths = draw(st.none() | lengths.map(torch.tensor))
    unbatched = lengths is None and batch == 1 and draw(st.booleans())
    if unbatched:
        x, states = x[:, 0], [state[:, 0] for state in states]
    elif layer.batch_first:
        x = x.transpose(0, 1).contiguous()
    states = states if isinstance(layer, nn.LSTM) else states[:1]
    return x, draw(st.sampled_from((None, states))), lengths


def outcome(layer, dtype, mode, x, states, lengths):
    """All results and gradients, where all results are given gradients."""
    layer = layer.to(dtype)
    for parameter in layer.parameters():
        parameter.grad = None
    x, *states = (t.detach().to(dtype).requires_grad_() for t in (x, *states))
    hidden = None if not states else tuple(states) if isinstance(layer, nn.LSTM) else states[0]
    with mode:
        if lengths is None:
            out, ends = layer(x, hidden)
        else:
            first = layer.batch_first
            packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
            out, ends = layer(packed, hidden)
            steps = x.shape[1 if first else 0]
            out, _ = pad_packed_sequence(
                out, batch_first=first, padding_value=2.0, total_length=steps
            )
    results = [out, *(ends if isinstance(ends, tuple) else [ends])]
    weights = [torch.linspace(-1, 2, r.numel()).view(r.shape) for r in results]
    sum((r * w.to(r)).sum() for r, w in zip(results, weights, strict=True)).backward()
    return [*results, *(t.grad for t in (x, *states, *layer.parameters()))]


@given(data=st.data())
def test_values_and_gradients_are_those_of_pytorch_in_float64(data):
    layer, dtype = data.draw(layers())
    layer = layer.to(dtype).double()  # numbers that both types have
    x, states, lengths = data.draw(calls(layer))
    x, *states = (t.to(dtype).double() for t in (x, *(states or ())))
    expected = outcome(layer, torch.float64, nullcontext(), x, states, lengths)
    found = outcome(layer, dtype, RecurrentLayers(), x, states, lengths)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == dtype
        assert (one.shape, one.is_contiguous()) == (other.shape, True) or layer.batch_first
        error = (one.double() - other).abs().max()
        assert error <= TOLERANCE[dtype] * other.abs().max().clamp(min=1), error


def arguments(kind, dtype, *, lengths, projected=False):
    """Of the forward operator `kind`: 5 steps, 2 sequences, 3 inputs, 4 cells."""
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    outputs = 2 if projected else 4
    tensors = [torch.randn(5, 2, 3), torch.randn(2, outputs)]
    tensors += [torch.randn(2, 4)] if kind == "lstm" else []
    tensors += [torch.randn(4 * gates, 3), torch.randn(4 * gates, outputs)]
    tensors += [torch.randn(4 * gates), torch.randn(4 * gates)]
    tensors += [torch.randn(2, 4) if projected else None] if kind == "lstm" else []
    tensors = [t if t is None else t.to(dtype).requires_grad_() for t in tensors]
    end = ["relu", True] if kind == "rnn" else [True, True]
    return *tensors, torch.tensor([2, 5]) if lengths else None, *end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(
    ("kind", "projected"), [("lstm", False), ("lstm", True), ("gru", False), ("rnn", False)]
)
def test_an_operator_keeps_its_schema_and_gives_what_its_shapes_say(
    kind, projected, lengths, dtype
):
    call = arguments(kind, dtype, lengths=lengths, projected=projected)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.ipu, kind).default, call, test_utils=tests)


@pytest.mark.parametrize("op", list(SAVED), ids=str)
def test_what_only_the_backward_pass_reads_is_made_on_request(op):
    kind = op.name().removeprefix("ipu::")
    *rest, _ = arguments(kind, torch.float32, lengths=False)
    saving, not_saving = op(*rest, True), op(*rest, False)
    for index, (one, other) in enumerate(zip(saving, not_saving, strict=True)):
        if index in SAVED[op]:
            assert (one.shape[0], other.shape[0]) == (5, 0)
        else:
            assert torch.equal(one, other)


def test_padding_is_not_read():
    layer = nn.LSTM(3, 4, bidirectional=True)
    x = torch.randn(5, 2, 3)
    lengths = torch.tensor([5, 2])
    results = []
    for value in (0.0, torch.nan):
        x[2:, 1] = value
        results.append(outcome(layer, torch.float32, RecurrentLayers(), x, [], lengths))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_tensors_that_do_not_fit_are_refused_before_anything_runs():
    x, h, c, wi, wh, *rest = arguments("lstm", torch.float32, lengths=False)
    x, h, c, wi, wh = (t.to("meta") for t in (x, h, c, wi, wh))
    for wrong, problem in (
        ((x[..., :2], h, c, wi, wh), "do not fit its input"),
        ((x, h[:1], c[:1], wi, wh), "1 sequences meets an input of 2"),
        ((x[:0], h, c, wi, wh), "at least one step"),
        ((x, h.half(), c, wi, wh), "one dtype"),
    ):
        with pytest.raises(RuntimeError, match=problem):
            torch.ops.ipu.lstm(*wrong, *rest)


def test_every_operator_counts_its_arithmetic():
    assert {op.overloadpacket for op in RECURRENT} <= flop_registry.keys()
