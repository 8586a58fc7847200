"""Check that operators of ours that stand for products count as much as the plain ones."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ipu_dynamo.ops.operators  # noqa: F401  the operators are registered

aten, ipu = torch.ops.aten, torch.ops.ipu
GEOMETRY = [2, 1], [1, 0], [1, 2]  # stride, padding, dilation


def flops(operator, *args):
    with FlopCounterMode(display=False) as counter:
        operator(*args)
    return counter.get_total_flops()


def halves(*shape):
    return torch.ones(shape, dtype=torch.float16)


def meta(*shape):
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("plain", "ours"),
    [
        pytest.param(
            (aten.mm, halves(3, 5), halves(5, 7)),
            (ipu.half_partials_matmul, halves(3, 5), halves(5, 7), 2),
            id="matrices",
        ),
        pytest.param(
            (aten.bmm, halves(2, 3, 5), halves(2, 5, 7)),
            (ipu.half_partials_matmul, halves(2, 3, 5), halves(2, 5, 7), 2),
            id="batches",
        ),
        pytest.param(
            (aten.mm, meta(3, 5), meta(5, 7)),
            (ipu.serialized_matmul, meta(3, 5), meta(5, 7), "reducing_dim", 2, False),
            id="serialized",
        ),
        pytest.param(
            (aten.mm, meta(3, 5), meta(5, 7)),
            (ipu.accumulate_matmul, meta(3, 7), True, meta(3, 5), meta(5, 7)),
            id="accumulated",
        ),
        pytest.param(
            (aten.addmm, meta(7), meta(3, 5), meta(5, 7)),
            (ipu.onednn_matmul, meta(3, 5), meta(5, 7), meta(7), "none"),
            id="onednn",
        ),
        pytest.param(
            (aten.mm, meta(3, 5), meta(5, 7)),
            (ipu.onednn_packed, meta(3, 5), meta(7, 5), None, "none"),
            id="packed",
        ),
        pytest.param(
            (aten.bmm, meta(2, 3, 5), meta(2, 5, 7)),
            (ipu.onednn_batched, meta(2, 3, 5), meta(2, 5, 7)),
            id="onednn batches",
        ),
    ],
)
def test_products_count_as_much_as_plain_ones(plain, ours):
    assert flops(*ours) == flops(*plain) > 0


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_count_as_much_as_plain_ones(groups):
    x, weight = halves(2, 4, 9, 8), halves(6, 4 // groups, 3, 2)
    made = aten.convolution(x, weight, None, *GEOMETRY, False, [0, 0], groups)
    gradient = torch.ones_like(made)

    def backward(*of):
        return flops(
            aten.convolution_backward, gradient, x, weight, None, *GEOMETRY, False, [0, 0], groups,
            [*of, False],
        )  # fmt: skip

    forward = flops(aten.convolution, x, weight, None, *GEOMETRY, False, [0, 0], groups)
    assert flops(ipu.half_partials_conv, x, weight, *GEOMETRY, groups, 2) == forward > 0
    rest = *GEOMETRY, groups, 2
    of_input = flops(ipu.half_partials_conv_input, [*x.shape], gradient, weight, *rest)
    of_weight = flops(ipu.half_partials_conv_weight, [*weight.shape], gradient, x, *rest)
    assert of_input == backward(True, False)
    # PyTorch counts the gradient of a grouped weight as if each group read all channels
    assert of_weight * groups == backward(False, True)


def test_projections_of_recurrent_layers_count():
    x, h, c = meta(4, 2, 3), meta(2, 5), meta(2, 6)
    weights = meta(24, 3), meta(24, 5), None, None
    without = flops(ipu.lstm, x, h, c, *weights, None, None, False, False)
    projected = flops(ipu.lstm, x, h, c, *weights, meta(5, 6), None, False, False)
    assert projected - without == 4 * flops(aten.mm, meta(2, 6), meta(6, 5))
