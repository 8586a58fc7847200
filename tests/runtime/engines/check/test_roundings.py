"""Check how far moved roundings bring the results of operators."""

import pytest
import torch
from torch import Tensor

from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.runtime.engines.check import roundings as module
from ipu_dynamo.runtime.engines.check.classes import operator_name, tensors_in
from ipu_dynamo.runtime.engines.check.roundings import Roundings

EPS = torch.finfo(torch.float32).eps


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, G, W, B = noise(6, 4, 5, 3), noise(6, 4, 5, 3, seed=1), noise(4, seed=2), noise(4, seed=3)
MEAN, RSTD = X.mean((0, 2, 3)), X.var((0, 2, 3), correction=0).add(1e-5).rsqrt()
GROUPS = torch.native_group_norm(X, W, B, 6, 4, 15, 2, 1e-5)
ROWS, AFFINE = noise(7, 9), (noise(9, seed=4), noise(9, seed=5))
LAYER = torch.native_layer_norm(ROWS, [9], *AFFINE, 1e-5)
LABELS = torch.tensor([0, 3, 8, 1, 2, 2, 5])
HAVE_SUMS = [  # an operator, and its arguments
    (aten._native_batch_norm_legit.no_stats, X, None, None, True, 0.1, 1e-5),
    (aten._native_batch_norm_legit_functional.default, X, W, B, MEAN, RSTD, True, 0.1, 1e-5),
    (aten._native_batch_norm_legit_functional.default, X, W, B, MEAN, RSTD, False, 0.1, 1e-5),
    (
        aten.native_batch_norm_backward.default,
        G,
        X,
        W,
        None,
        None,
        MEAN,
        RSTD,
        True,
        1e-5,
        [True] * 3,
    ),
    (
        aten.native_batch_norm_backward.default,
        G,
        X,
        W,
        MEAN,
        RSTD,
        None,
        None,
        False,
        1e-5,
        [True] * 3,
    ),
    (aten.native_group_norm.default, X, W, B, 6, 4, 15, 2, 1e-5),
    (aten.native_group_norm_backward.default, G, X, *GROUPS[1:], W, 6, 4, 15, 2, [True] * 3),
    (aten.native_layer_norm.default, ROWS, [9], *AFFINE, 1e-5),
    (aten.native_layer_norm_backward.default, ROWS, ROWS, [9], *LAYER[1:], *AFFINE, [True] * 3),
    (aten._fused_rms_norm.default, ROWS, [9], AFFINE[0], 1e-5),
    (aten.var_mean.correction, X, [0, 2]),
    (aten.std_mean.correction, X, [0, 2]),
    (aten.linalg_vector_norm.default, ROWS, 2, [0]),
    (aten.nll_loss_forward.default, ROWS, LABELS, None, 1, -100),
    (aten.mse_loss.default, ROWS, ROWS.flip(0)),
    (aten.smooth_l1_loss.default, ROWS, ROWS.flip(0), 2),
    (aten.huber_loss.default, ROWS, ROWS.flip(0)),
    (aten.soft_margin_loss.default, ROWS, ROWS.flip(0).sign()),
    (aten.binary_cross_entropy.default, ROWS.sigmoid(), ROWS.flip(0).sigmoid()),
    (aten.binary_cross_entropy_with_logits.default, ROWS, ROWS.flip(0).sigmoid()),
    (aten._softmax.default, ROWS, 1, False),
    (aten._log_softmax.default, ROWS, 0, False),
    (aten._softmax_backward_data.default, ROWS, ROWS.softmax(1), 1, torch.float32),
    (aten._log_softmax_backward_data.default, ROWS, ROWS.log_softmax(1), 1, torch.float32),
]


def copied(args):
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def of_type(dtype, args):
    floating = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    return [a.to(dtype) if is_one else a for a, is_one in zip(args, floating, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "args"), [(o, a) for o, *a in HAVE_SUMS])
def test_the_sums_of_an_operator_compute_the_same(operator, args, dtype):
    args = [dtype if a is torch.float32 else a for a in of_type(dtype, args)]
    right = tensors_in(operator(*copied(args)))
    found = tensors_in(Roundings(0).call(operator, copied(args), {}))
    assert operator_name(operator) in module._HAVE_SUMS
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == other.dtype
        few = 200 * EPS if dtype == torch.float32 else 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, rtol=few, atol=few)


SUMS = [  # an operator, its arguments, and the sizes of its terms
    (aten.sum.dim_IntList, [ROWS, [0]], ROWS.abs().sum(0)),
    (aten.mean.dim, [ROWS, [0]], ROWS.abs().mean(0)),
    (aten.mm.default, [ROWS, ROWS.t()], ROWS.abs() @ ROWS.abs().t()),
]


@pytest.mark.parametrize(("operator", "args", "sizes"), SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_sum_moves_by_roundings_of_its_terms(operator, args, sizes, dtype):
    args = of_type(dtype, args)
    right, bound = operator(*args), sizes.double()
    eps, unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps, torch.finfo(dtype).eps
    moved = torch.stack([Roundings(n).call(operator, args, {}) for n in range(20)])
    far = (moved.double() - right.double()).abs().amax(0)
    assert (far <= 1.01 * eps * bound + 2 * unit * right.double().abs()).all()
    assert (far >= 0.5 * torch.maximum(eps * bound, unit * right.double().abs() / 2)).all()


def test_what_is_accumulated_in_place_moves_by_roundings_of_all_terms():
    """The sum is zero, and its terms are not."""
    moved = []
    for number in range(8):
        total = torch.full((2, 2), -12.0)
        a, b = torch.ones(2, 3), torch.full((3, 2), 4.0)
        Roundings(number).call(accumulate_matmul, [total, True, a, b], {})
        moved.append(total)
    assert torch.stack(moved).abs().max() == pytest.approx(24 * EPS)


def test_terms_that_are_zero_do_not_move():
    assert not Roundings(0).call(aten.mm.default, [torch.zeros(3, 4), noise(4, 5)], {}).any()


@pytest.mark.parametrize(("shape", "dims"), [((5000, 3), [0]), ((3, 5000), [1]), ((5000,), [])])
def test_a_sum_of_equal_terms_is_off_as_in_a_loop(shape, dims):
    x = torch.full(shape, 0.1)
    right, looped = x.double().sum(dims), Roundings(0).call(aten.sum.dim_IntList, [x, dims], {})
    in_pairs = x.sum(dims)
    assert ((looped - right).abs() > 100 * EPS * right).all()
    assert ((in_pairs - right).abs() < 3 * EPS * right).all()
