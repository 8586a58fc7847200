"""Check the layers in parts: the values and gradients of the whole ones, and their files."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poptorch
from ipu_dynamo import Options, Strategy, compile_inference
from ipu_dynamo.optimum import SerializedEmbedding, SerializedLinear, SplitProjection
from ipu_dynamo.optimum.checkpoint import CheckpointOutputs, recomputation_checkpoint

MODES = ["output_channels", "reducing_dim"]


def gradients(model, *inputs):
    """What a model returns, and the gradient of each of its parameters, joined."""
    model.zero_grad()
    result = model(*inputs)
    torch.manual_seed(0)
    (result * torch.randn_like(result)).sum().backward()
    return result, [p.grad for p in model.parameters()]


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, 0, 1, -1]),
    st.data(),
)
def test_an_embedding_in_parts_is_the_whole_one(factor, rows, exact, padding, data):
    total = factor * rows if exact else data.draw(st.integers(1, 17))
    padding = None if padding is not None and padding >= total else padding
    plain = nn.Embedding(total, 3, padding_idx=padding, dtype=torch.float64)
    make = SerializedEmbedding if exact else SerializedEmbedding.filled_up
    layer = make(plain, factor)
    indices = torch.randint(0, total, (4, 5))
    expected, (whole,) = gradients(plain, indices)
    result, parts = gradients(layer, indices)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.cat(parts)[:total], whole)
    assert not torch.cat(parts)[total:].any()
    state = layer.state_dict()
    assert torch.equal(torch.cat(list(state.values())), plain.weight)
    other = make(nn.Embedding(total, 3, padding_idx=padding, dtype=torch.float64), factor)
    other.load_state_dict(state)
    back = other.to_model()
    assert torch.equal(back.weight, plain.weight)
    assert (type(back), back.padding_idx) == (nn.Embedding, plain.padding_idx)


def test_a_row_of_nans_stays_where_it_is():
    plain = nn.Embedding(4, 2)
    plain.weight.data[0] = float("nan")
    result, grads = gradients(SerializedEmbedding(plain, 2), torch.tensor([1, 3]))
    assert torch.equal(result, plain.weight[[1, 3]])
    assert not torch.cat(grads).isnan().any()


@pytest.mark.parametrize("total", [5, 6])
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_indices_that_a_table_has_not_got_are_errors(total, engine):
    plain = nn.Embedding(total, 2)
    layer = SerializedEmbedding.filled_up(plain, 4)
    for index in (-1, total, total + 1, 8, 100):
        indices = torch.tensor([0, index])
        with pytest.raises(IndexError, match="out of range"):
            plain(indices)
        with pytest.raises(IndexError, match="out of range"):
            layer(indices)
    for one in (plain, layer):
        with pytest.raises(Exception, match="index out of"):
            compile_inference(one, Options(engine=engine))(torch.tensor([0, total]))


def test_a_frozen_embedding_stays_frozen():
    plain = nn.Embedding(4, 2).requires_grad_(False)
    layer = SerializedEmbedding.from_model(plain, 2).eval()
    assert not any(p.requires_grad for p in layer.parameters())
    assert not layer.to_model().weight.requires_grad
    assert not layer.to_model().training


def test_tables_that_cannot_be_cut():
    with pytest.raises(AssertionError, match="table of 5 rows cannot be cut into 2"):
        SerializedEmbedding(nn.Embedding(5, 2), 2)
    with pytest.raises(ValueError, match="max_norm"):
        SerializedEmbedding(nn.Embedding(4, 2, max_norm=1.0), 2)

    class Scaled(nn.Embedding):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match="Scaled may do more than look up"):
        SerializedEmbedding(Scaled(4, 2), 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", [*MODES, "input_channels", "none"])
def test_a_product_in_parts_is_the_whole_one(mode, bias):
    plain = nn.Linear(6, 7, bias=bias)
    layer = SerializedLinear.from_model(plain, 4, mode)
    assert layer.weight is not plain.weight
    x = torch.randn(5, 2, 6)
    torch.testing.assert_close(gradients(layer, x), gradients(plain, x))
    (member,) = [m for m in poptorch.MatMulSerializationMode if m.value == mode]
    assert SerializedLinear(6, 7, 4, bias, member).mode == mode
    step = compile_inference(layer, Options(engine="eager"))
    torch.testing.assert_close(step(x), plain(x))
    products = str(step.program).count("aten.mm") + str(step.program).count("aten.addmm")
    assert products == (1 if mode == "none" else 4)
    back = layer.to_model()
    assert type(back) is nn.Linear
    assert vars(back).keys() == vars(plain).keys()
    torch.testing.assert_close(back.state_dict(), plain.state_dict())


def test_modes_that_there_are_not():
    with pytest.raises(ValueError, match="no mode 'rows'"):
        SerializedLinear(2, 2, 1, mode="rows")
    with pytest.raises(ValueError, match="cannot have the mode 'input_channels'"):
        SplitProjection(nn.Linear(2, 2), 1, "input_channels")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_split_projection_is_the_whole_one(mode, bias):
    plain = nn.Linear(4, 6, bias=bias, dtype=torch.float64)
    layer = SplitProjection(plain, 2, mode)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    expected, whole = gradients(plain, x)
    result, parts = gradients(layer, x)
    torch.testing.assert_close(result, expected)
    own = dict(zip([name for name, _ in layer.named_parameters()], parts, strict=True))
    weights = [grad for name, grad in own.items() if name != "bias"]
    torch.testing.assert_close(torch.cat(weights, 0 if mode == MODES[0] else 1), whole[0])
    assert not bias or torch.equal(own["bias"], whole[1])
    torch.testing.assert_close(layer.to_model().state_dict(), plain.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="cannot be cut into 5 equal parts"):
        SplitProjection(plain, 5, mode)


def test_padding_of_a_projection_is_in_no_result_and_no_file():
    plain = nn.Linear(3, 7)
    layer = SplitProjection.filled_up(plain, 4)
    x = torch.randn(2, 3)
    torch.testing.assert_close(layer(x), plain(x))
    state = layer.state_dict()
    assert sum(len(value) for name, value in state.items() if "split" in name) == 7
    other = SplitProjection.filled_up(nn.Linear(3, 7), 4)
    other.load_state_dict(state)
    torch.testing.assert_close(other.to_model().state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: (SerializedEmbedding(nn.Embedding(8, 2), 4), torch.arange(8)),
        lambda: (SplitProjection(nn.Linear(2, 8, bias=False), 4), torch.randn(3, 2)),
    ],
)
def test_parts_lie_on_their_ipus(make):
    layer, x = make()
    assert layer.parallelize([0, 1, 3]) is layer
    step = compile_inference(layer, Options(engine="eager", strategy=Strategy(kind="sharded")))
    torch.testing.assert_close(step(x), layer(x))
    assert [v.ipu for v in step.program.variables if v.kind == "parameter"] == [1, 2, 2, 2]
    with pytest.raises(ValueError, match=r"splits \[1, 1\] are not 4 parts"):
        layer.deparallelize().parallelize([1, 1])
    assert not any(part._forward_pre_hooks for part in layer.modules())


def test_checkpoints_are_marked_and_removed():
    class Two(nn.Module):
        def forward(self, x):
            return x + 1, x * 2, None

    model = Two()
    handle = recomputation_checkpoint(model)
    assert isinstance(next(iter(model._forward_hooks.values())), CheckpointOutputs)
    assert model(torch.ones(1)) == (torch.tensor([2.0]), torch.tensor([2.0]), None)
    handle.remove()
    assert not model._forward_hooks
