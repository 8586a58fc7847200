"""Check that writes under a mask train as in plain PyTorch, or are refused with their line."""

import random
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import CompileError, compile_training
from ipu_dynamo.torch_compile.backend import ipu

EAGER = {"engine": "eager"}
LOOPED = {**EAGER, "gradient_accumulation": 2}


class Masked(nn.Module):
    """Writes a learned value into what it computes of its input."""

    def __init__(self, write, shape, size):
        super().__init__()
        self.scale, self.value = (nn.Parameter(torch.randn(s)) for s in (shape[1:], size))
        self.write = write

    def forward(self, x, mask):
        return F.mse_loss(self.write(x * self.scale, mask, self.value), x.flip(0))


def assert_trains(model, *inputs, options=EAGER):
    """Parameters after one step, through both front ends, are those of plain PyTorch."""
    start = [p.detach().clone() for p in model.parameters()]
    count = options.get("gradient_accumulation", 1)
    sum(model(*part) for part in zip(*(x.chunk(count) for x in inputs), strict=True)).backward()
    expected = [p.grad / count for p in model.parameters()]
    if count == 1:
        model.zero_grad()
        torch._dynamo.reset()
        torch.compile(model, backend=ipu, fullgraph=True, options=EAGER)(*inputs).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    compiled = compile_training(model, torch.optim.SGD(model.parameters(), 1.0), options)
    compiled(*inputs)
    compiled.read_weights()
    for parameter, before, gradient in zip(model.parameters(), start, expected, strict=True):
        torch.testing.assert_close(before - parameter.detach(), gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.examples(8)
@given(data=st.data(), density=st.sampled_from([0.0, 0.5, 1.0]), accumulate=st.booleans())
def test_a_value_for_all_masked_places_trains(data, density, accumulate):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    first = data.draw(st.integers(0, len(shape) - 1))
    stop = data.draw(st.integers(first + 1, len(shape)))
    selected = [*shape[:first], 1, *shape[stop:]]  # what the mask selects, with one place
    size = selected[data.draw(st.integers(0, len(selected))) :]
    size = [data.draw(st.sampled_from([1, n])) for n in size]
    in_place = data.draw(st.booleans())

    def write(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        put = torch.ops.aten.index_put_ if in_place else torch.ops.aten.index_put
        return put(x, [*[None] * first, mask], value, accumulate)

    mask = torch.rand(shape[first:stop]) < density
    assert_trains(Masked(write, shape, size), torch.randn(shape), mask)


def set_at(x, mask, value):
    x[mask] = value
    return x


def chain(x, mask, value):
    """Masks that are written under masks, and a mask of bytes."""
    mask = mask.clone()
    mask[mask.logical_not()] = mask[0, 0]
    x[mask.to(torch.uint8)] = value
    x[:, 1:][mask[:, 1:]] = 0.25
    return x


def in_branch(x, mask, value):
    return torch.cond(mask.any(), lambda x, m, v: set_at(x.clone(), m, v), lambda x, m, v: x + 0,
                      (x, mask, value))  # fmt: skip


@pytest.mark.parametrize("write", [set_at, in_branch])
def test_micro_batches_write_under_their_part_of_a_mask(write):
    mask = torch.rand(4, 3) > 0.5
    assert_trains(Masked(write, (4, 3, 2), (2,)), torch.randn(4, 3, 2), mask, options=LOOPED)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_may_be_written_under_masks():
    x, mask = torch.randn(4, 3, 2), torch.rand(4, 3) > 0.5
    model = Masked(chain, (4, 3, 2), (2,))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    expected = model(x, mask)
    torch.testing.assert_close(compile_training(model, optimizer, EAGER)(x, mask), expected)


def test_what_is_hidden_does_not_reach_a_gradient():
    """Neither an infinite value that is overwritten, nor the infinite gradient of one that is."""

    model = Masked(lambda x, m, v: 1 / set_at(x, m, v), (2, 3), ())
    with torch.no_grad():
        model.scale[1] = 0.0
    mask = torch.tensor([[False, True, False]] * 2)
    assert_trains(model, torch.rand(2, 3) + 1, mask)


def rows(x, mask, value):
    x[mask] = value
    return x


@pytest.mark.filterwarnings("ignore:Error detected in IndexPutBackward0")
@pytest.mark.parametrize(
    ("write", "size", "problem", "hint"),
    [
        (rows, (5, 2), "an element for each that the mask selects", "masked_scatter"),
        (rows, (3,), "does not fit what a mask of shape [4, 3] selects", "the shape [2]"),
        (lambda x, m, v: set_at(x, m[:3], v), (2,), "a mask of shape [3, 3] does not fit", "size"),
        (lambda x, m, v: x + x[m].mean(0), (2,), "what a mask selects", "masked_fill"),
        (lambda x, m, v: set_at(x, m, v[:1] * x[m]), (2,), "what a mask selects", "torch.where"),
    ],
)
def test_what_has_no_size_is_refused_with_its_line(write, size, problem, hint):
    model = Masked(write, (4, 3, 2), size)
    compiled = compile_training(model, torch.optim.SGD(model.parameters(), 0.1), EAGER)
    with pytest.raises(CompileError) as error:
        compiled(torch.randn(4, 3, 2), torch.ones(4, 3, dtype=torch.bool))
    for text in (problem, hint, "test_write_under_mask.py"):
        assert text in str(error.value)


def test_what_the_hint_of_rows_says_trains():
    def scatter(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        return x.masked_scatter(mask[..., None], value)

    mask = torch.tensor([[True, False, True]] * 4)
    assert_trains(Masked(scatter, (4, 3, 2), (8, 2)), torch.randn(4, 3, 2), mask)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_are_reported(draw):
    compiled = ipu_dynamo.compile_inference(lambda x: x * draw(), EAGER)
    with pytest.warns(UserWarning, match="random numbers of Python or NumPy"):
        compiled(torch.ones(2))


class Speech(nn.Module):
    """A speech encoder of transformers that hides times and features of its input (SpecAugment)."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "conv_dim": (4,), "conv_kernel": (8,)}
        config, model = (getattr(transformers, kind + part) for part in ("Config", "Model"))
        self.encoder = model(
            config(
                **{**sizes, "conv_stride": (8,), "num_feat_extract_layers": 1},
                **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
                **dict.fromkeys(("mask_time_prob", "mask_feature_prob"), 0.4),
                **dict.fromkeys(("mask_time_length", "mask_feature_length"), 2),
                **dict.fromkeys(("num_conv_pos_embeddings", "num_conv_pos_embedding_groups"), 2),
                **dict.fromkeys(("hidden_dropout", "activation_dropout", "layerdrop"), 0.0),
                **dict.fromkeys(("attention_dropout", "feat_proj_dropout"), 0.0),
            )
        )

    def forward(self, x, y, mask=None):
        return F.mse_loss(self.encoder(x, mask_time_indices=mask).last_hidden_state, y)


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
def test_speech_encoders_train_under_masks(kind):
    """A mask that is an input is that of each call; those that NumPy draws are the first call's."""
    model = Speech(kind).train()
    learned = model.encoder.masked_spec_embed
    inputs = torch.randn(2, 160), torch.randn(2, 20, 8), torch.rand(2, 20) > 0.5
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    compiled = compile_training(model, optimizer, EAGER)
    reference = Speech(kind).train()
    training = torch.optim.SGD(reference.parameters(), 0.5)
    for step in range(2):
        np.random.seed(0)
        with warnings.catch_warnings(record=True) as reports:
            loss = compiled(*inputs)
        np.random.seed(0)  # features are drawn still
        training.zero_grad()
        expected = reference(*inputs)
        expected.backward()
        training.step()
        torch.testing.assert_close(loss, expected.detach(), atol=1e-4, rtol=1e-4)
        assert any("NumPy" in str(report.message) for report in reports) == (step == 0)
        inputs = (*inputs[:2], inputs[2].logical_not())
    compiled.read_weights()
    torch.testing.assert_close(learned, reference.encoder.masked_spec_embed, atol=1e-4, rtol=1e-4)
