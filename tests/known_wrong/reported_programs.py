"""Programs after public reports of wrong numbers from torch.compile on CPU, the newest first.

The number of a program is that of the report at https://github.com/pytorch/pytorch/issues.
Each is written anew: few operators, small tensors. Report 193279 is not among them: no backend sees
that an `autograd.Function` under `torch.func.grad` has a backward of its own
(`docs/torch_compile.md` names it). Nor is 189804: the sign of GELU at -5.5 is -1, as compiled code
says, and plain PyTorch rounds that GELU to zero.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.known_wrong.reports import Compile, compiled, program

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, u8, i32, i64 = torch.int8, torch.uint8, torch.int32, torch.int64
INF, NAN = math.inf, math.nan
tensor, arange = torch.tensor, torch.arange


def noise(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    """The same noise in each process."""
    generator = torch.Generator().manual_seed(len(shape) * 100 + math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=f64).to(dtype)


@compiled(198201, arange(12.0).view(1, 1, 3, 4))
def nearest_of_a_size_that_stays(x):
    return F.interpolate(x, scale_factor=(1.3, 1.5), mode="nearest")


@compiled(198133, tensor([0.999, 1 - 1e-14, 1 - 1e-16], dtype=f64))
def erfinv_near_one(x):
    return torch.erfinv(x)


@compiled(198131, torch.zeros(3, 4), arange(12.0).view(3, 4))
def copy_before_the_source_changes(target, source):
    target[0:, :] = source[0:, :]
    source.add_(1)
    return source


@compiled(198119, arange(14.0).view(2, 7), gradients=True)
def average_pool_with_ceil_mode(x):
    return F.avg_pool1d(x, 3, 2, ceil_mode=True)


@compiled(198101, arange(-12, 12).view(4, 6))
def view_of_bits_before_a_write(x):
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:5] = 2
    return y.view(torch.int64)


@compiled(198094, arange(24).view(4, 6), arange(-12, 12).view(4, 6))
def slice_scatter_before_zero(x, source):
    y = torch.slice_scatter(x, source[1:3], dim=0, start=1, end=3)
    x.zero_()
    return y


@compiled(198094, arange(16.0).view(4, 4))
def diagonal_scatter_before_fill(x):
    y = torch.diagonal_scatter(x, x.diagonal())
    x.fill_(2)
    return y


@compiled(198081, tensor([[0, 3], [0, 0]], dtype=u8))
def any_of_uint8(x):
    return torch.any(x), x.any(0), torch.any(x) * 200 + 100


@compiled(198071, tensor([-128, -3, 0, 5, 127], dtype=i8))
def clamp_by_more_than_the_type_holds(x):
    return torch.clamp(x, -1000, 1000)


@program(198031)
def custom_operator_that_writes_a_clone(compile_with: Compile) -> Any:
    if not hasattr(torch.ops, "known") or not hasattr(torch.ops.known, "add_into"):

        @torch.library.custom_op("known::add_into", mutates_args={"x", "y"})
        def add_into(y: Tensor, x: Tensor) -> None:
            y.add_(x)
            x.zero_()

    def f(x):
        y = x.clone()
        torch.ops.known.add_into(y, x)
        return y

    x = arange(4.0)
    return compile_with(f)(x), x


@compiled(197895, tensor([1.0, 0.5, 6.0, 1.0]), tensor([0.1, 0.1, 0.2, 1 / 3]))
def floor_division(a, b):
    return a // b, torch.div(a, b, rounding_mode="floor")


@program(197893)
def result_that_is_the_input(compile_with: Compile) -> Any:
    x = arange(4.0)
    y = compile_with(lambda logits, temperature: logits / temperature)(x, 1.0)
    y.clamp_(max=1)
    return x, y


@compiled(197829, arange(12.0).view(4, 3))
def shift_of_rows_in_place(x):
    x[1:] = x[:-1].clone()
    return x


@compiled(197108, torch.zeros(0), torch.zeros(0, 1))
def mean_of_nothing(x, y):
    return torch.var_mean(x), torch.std_mean(y, correction=0)


@compiled(197091, torch.ones(3, dtype=torch.bool), noise(3).half(), noise(3))
def type_of_ldexp(mask, half, single):
    return torch.ldexp(mask, half), torch.ldexp(half, single)


@compiled(197089, noise(64) * 1e30, noise(64) * 1e-30, noise(64) + 1e5)
def variance_of_large_and_small_numbers(large, small, near):
    return large.std(), small.std(), near.var()


@program(196681)
def products_of_padded_channels_last(compile_with: Compile) -> Any:
    def f(x):
        v = F.gelu(x)
        a = F.pad(v.permute(3, 2, 1, 0), (0, 0, 0, 12), value=0.5)
        b = F.pad(v, (0, 0, 0, 0, 0, 12), value=0.5)
        return torch.matmul(b, a)

    x = noise(1, 8, 20, 20).contiguous(memory_format=torch.channels_last)
    return compile_with(f)(x)


@compiled(196596, torch.full((4,), NAN), noise(1, 4), noise(4, 4))
def addmm_that_ignores_its_first_argument(x, a, b):
    return torch.addmm(x, a, b, beta=0)


@program(196468)
def attention_whose_softmax_is_over_heads(compile_with: Compile) -> Any:
    def f(q, k, v):
        scores = torch.softmax((q @ k.transpose(-2, -1)).div(2), dim=1)
        return F.dropout(scores, 0.2, training=False) @ v

    with torch.no_grad():
        return compile_with(f)(noise(4, 4, 2, 8), noise(4, 4, 3, 8), noise(4, 4, 3, 8) + 1)


@compiled(195422, torch.ones(3))
def write_through_dropout(x):
    y = F.dropout(x, 0.5, training=False)
    y.add_(1)
    return y


@compiled(194501, tensor([1.0]), tensor([0.0]))
def loss_with_a_negative_beta(x, y):
    return F.smooth_l1_loss(x, y, beta=-1.0)


@compiled(194347, tensor([-0.0]), tensor([0.0]))
def sign_of_the_smaller_zero(x, y):
    return 1 / torch.minimum(x, y)


@compiled(194345, tensor([1e10, 65504.0]), tensor([1e-20, 6e-8]))
def remainder_of_far_numbers(x, y):
    return torch.remainder(x, y), torch.fmod(x, y)


@compiled(193757, torch.ones(4) * 1.5)
def cross_entropy_of_no_probability(target):
    return F.binary_cross_entropy(torch.ones_like(target), target)


_BYTES = tensor([5, 1, 100, 3, 7, 8, 9, 13, 100, 120, 127, 2, 6, 4, 11, 12, 90, 80])


@compiled(191499, _BYTES.to(u8), (-_BYTES).to(i8))
def extremes_of_bytes(x, y):
    return x.min(), y.max(), x.argmin(), y.argmax()


@compiled(191308, torch.ones((1, 1, 2), dtype=i8), torch.ones((1, 2, 2), dtype=i8))
def product_of_bytes(a, b):
    return torch.matmul(a, b)


@compiled(190764, torch.full((2, 2), 2**30, dtype=i32), torch.full((2, 2), 2, dtype=i32))
def sum_that_wraps(x, y):
    return (x @ y + x @ y + x).sum(dim=1), (x + x).to(i64)


@compiled(189799, tensor([-0.5, -0.1]))
def negative_zero_plus_zero(x):
    v = torch.ceil(x)
    return 1 / (v + torch.zeros_like(v))


@compiled(189799, tensor([-0.5, -0.1]))
def elu_of_negative_zero(x):
    return 1 / F.elu(torch.ceil(x))


@compiled(189799, tensor([-0.0, 0.0, 4.0]))
def reciprocal_of_a_root_of_negative_zero(x):
    return 1 / torch.sqrt(x)


@compiled(189518, torch.zeros(1))
def type_of_a_cumulative_sum(x):
    ones = torch.ones((2, 4, 4), dtype=torch.bool)
    return ones.cumsum(1, dtype=bf16), x


@compiled(188048, tensor([NAN, INF, -INF], dtype=f64), torch.ones(3, dtype=f64))
def floor_of_infinity(a, b):
    return torch.div(a, b, rounding_mode="floor"), torch.div(b, a, rounding_mode="floor")


@compiled(187935, tensor([[1.0, -0.0, 0.0], [-1.0, -0.0, 2.5]], dtype=f64))
def sign_of_zeros_in_double(x):
    return torch.signbit(x)


@compiled(187336, tensor([100.0]))
def sign_of_log_ndtr(x):
    return torch.copysign(torch.ones(()), torch.special.log_ndtr(x))


@compiled(186875, tensor([1.703125, -1.703125], dtype=bf16))
def fmod_of_half(x):
    return torch.fmod(x, 1.7), torch.remainder(x, 1.7)


@compiled(186799, noise(2, 3), noise(3, 2).view(2, 3), gradients=True)
def gradient_of_the_least_angle(x, y):
    return torch.atan2(x, y).amin(dim=-1)


@compiled(186379, tensor([NAN, INF, 1.0]))
def zero_times_what_is_not_finite(x):
    return x * 0, torch.zeros_like(x) * x


@compiled(185605, tensor([[0.0, 0.1], [-0.2, 1.0]], dtype=bf16), tensor(-0.1, dtype=f64))
def half_plus_a_double_number(x, y):
    return torch.add(x, y)


@compiled(185480, tensor([-9.183549615799121e-41, -1.0], dtype=bf16))
def celu_of_a_denormal(x):
    return F.celu(x), F.elu(x)


@program(185382)
def moments_in_a_loop(compile_with: Compile) -> Any:
    def step(p, g, m, v, count):
        count.add_(1)
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        now = count.item()
        denominator = (v.sqrt() / ((1 - 0.999**now) ** 0.5)).add_(1e-8)
        p.addcdiv_(m, denominator, value=-0.1 / (1 - 0.9**now))

    def loop(p, g):
        m, v, count = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
        for _ in range(4):
            step(p, g, m, v, count)
        return p

    return compile_with(loop)(noise(5), noise(5) + 1)


@compiled(185337, arange(20.0).view(5, 4).t() / 7, close=0)
def cast_to_half_and_back(x):
    return x.to(f16).to(f32)


@compiled(184893, noise(5, 32) > 0)
def indices_of_the_least_bool(x):
    return x.min(0), x.max(0)


@compiled(183898, arange(2.0, 14.0, 2), tensor([30.0, 40.0, 50.0]), gradients=True)
def gradient_of_slice_scatter(x, y):
    return torch.slice_scatter(x, y, dim=0, start=1, end=4).sum()


@compiled(183763, tensor([89.0, 89.4, -89.2]))
def sinh_near_the_largest_number(x):
    return torch.sinh(x)


@compiled(183761, noise(64).half())
def sum_of_choices_in_half(x):
    y = torch.where(x > 0, x, torch.full_like(x, 0.1))
    return (y.float() + 0.001).half().float() + y


@compiled(183608, tensor([2, -2, 4]), arange(10.0).view(5, 2))
def embedding_of_a_negative_index(i, weight):
    return F.embedding(i, weight)


@compiled(183606, tensor([-0.0, -2.0, 3.0]))
def fraction_of_negative_zero(x):
    return 1 / torch.frac(x)


@compiled(183605, torch.full((3, 5), 1e-10, dtype=f16))
def variance_that_vanishes_in_half(x):
    return x * torch.rsqrt(x.var(dim=-1, keepdim=True) + 1e-9)


@compiled(183083, tensor([-4.0, -1.5, 0.1, 3.140625, 8.0], dtype=f16))
def remainder_of_half(x):
    return torch.remainder(x, 3.14)


@compiled(183082, noise(4, 8))
def largest_of_a_transposed_sine(x):
    return torch.argmax(x.sin_().t()), torch.argmin(x.t())


@compiled(182012, noise(8, 8), noise(8), gradients=True)
def gradient_of_diagonal_scatter(x, y):
    return torch.diagonal_scatter(x, y).sum()


@compiled(180164, noise(4, 13, 3), noise(4, 6, 3), gradients=True)
def gradient_of_a_sum_of_slice_scatter(x, y):
    return torch.slice_scatter(x, y, dim=1, start=0, end=6).sum(dim=1)


@compiled(179571, torch.zeros(1))
def cumulative_sum_of_a_constant(x):
    return (
        torch.full((70,), 4, dtype=i8).cumsum(0, dtype=i8)[-1],
        torch.full((3,), 1.5).cumsum(0, dtype=f16),
        torch.full((300,), 100, dtype=u8).sum(dtype=u8),
        x,
    )


@compiled(178013, tensor([0, 7]), tensor([0, 2]))
def division_by_zero(x, y):
    return torch.floor_divide(x, y)


@compiled(175154, tensor([[[[1.0, 2.0]]]], dtype=f64))
def nearest_of_a_size_that_stays_in_double(x):
    return F.interpolate(x, scale_factor=1.3, mode="nearest")


@compiled(174891, torch.full((2, 2), 1.0, dtype=torch.complex64))
def sum_of_complex_numbers_that_broadcast(x):
    return x + torch.ones(2, 1, dtype=torch.complex64)


@compiled(174172, noise(6))
def copysign_of_negative_zero(x):
    return torch.copysign(x, -0.0)


@compiled(173793, torch.full((2, 8), 8.5071e37) * noise(2, 8).sign())
def layer_norm_of_huge_numbers(x):
    return F.layer_norm(x, (8,))


@compiled(172061, noise(3, 3, 4).half())
def grid_of_an_affine_map_in_half(theta):
    return F.affine_grid(theta, [3, 1, 8, 8, 8], align_corners=True)


@compiled(169779, noise(5, 2))
def index_select_of_a_negative_index(x):
    return torch.index_select(x, 0, tensor([-1]))


@compiled(168358, noise(5), gradients=True)
def gradient_of_the_largest_by_index(x):
    out = torch.full((1,), -INF)
    return out.index_reduce(0, torch.zeros(5, dtype=i64), x, "amax", include_self=False)


@compiled(154420, tensor([5, 7], dtype=i32), tensor([0, 2], dtype=i32))
def remainder_by_zero(x, y):
    return torch.fmod(x, y)


@compiled(151918, noise(8, 1), arange(8) - 4)
def table_by_negative_indices(weight, index):
    return torch.embedding(weight, index)


@compiled(148241, noise(3, 64))
def angle_of_shrunk_numbers(x):
    y = F.tanhshrink(x)
    return torch.atan2(y, y)


@compiled(147450, tensor([-1.0, 2.0]))
def trigamma_at_a_pole(x):
    return torch.special.polygamma(1, x)


@compiled(145466, noise(32, 32).half())
def floor_of_a_cosine_in_half(x):
    return torch.floor(torch.cos(x)), torch.round(torch.sin(x))


@compiled(143978, tensor([0.5, -1.2, 0.3]))
def sine_of_an_angle_of_nan(x):
    return torch.sin(torch.atan(torch.angle(torch.rsqrt(x))))


@compiled(143648, tensor(2.0))
def digamma_by_polygamma(x):
    return torch.special.polygamma(0, x)


@compiled(143555, tensor([1000, -1000]), tensor([64, 64]))
def shift_by_the_width(x, y):
    return x >> y, x << y


@program(139789)
def inputs_that_share_memory_in_a_later_call(compile_with: Compile) -> Any:
    def f(x, y):
        x.mul_(2)
        return x + y

    g, base = compile_with(f), arange(8.0)
    g(torch.ones(4), torch.ones(4))
    return g(base[:4], base[2:6]), base


@compiled(138908, tensor([[0, 0]]), noise(2, 32))
def doubled_rows_by_index(i, y):
    y[i] += y[i]


@compiled(136662, noise(2, 3))
def gradient_of_two_writes_to_a_column(x):
    def g(x):
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].abs()
        y[:, 0] += x[:, 2].abs()
        return y.sum()

    return torch.func.grad(g)(x)


@compiled(128306, tensor([[0.1, 0.2002, 0.3, 0.4]]).bfloat16())
def half_above_a_number(x):
    return torch.nonzero(x > 0.2)


@compiled(126848, tensor(0.1875))
def denormals(x):
    return x * 2.0 ** (-127 + 3), x


@compiled(121227, noise(1, 9))
def stack_of_a_split(x):
    return torch.tanh(torch.stack(torch.split(x, [3, 3, 3], dim=-1), dim=-1))


@compiled(118266, tensor([-2.0, 100.0]))
def largest_of_nan(x):
    return torch.argmax(torch.log1p(x))


@compiled(117623, torch.zeros(2, dtype=i32), tensor([0.9201, 0.1166]))
def cumulative_sum_into_integers(out, x):
    return torch.cumsum(x, 0, out=out)


@compiled(113167, tensor(0.3))
def variance_of_one_number(x):
    return torch.var_mean(x, correction=4.9, dim=-1, keepdim=True)


@compiled(109925, torch.zeros(1))
def cumulative_sum_of_bools(x):
    return torch.cumsum(torch.full([2, 4], 1).to(torch.bool), 1), x


@compiled(108520, tensor(2**31 - 1, dtype=i32))
def sum_before_a_wider_type(x):
    return (x + x).to(i64)


@compiled(105264, tensor(128, dtype=u8))
def sum_of_bytes_before_a_wider_type(x):
    return (x + x).to(torch.int16)


@compiled(100793, noise(3, 5, 7, 2), gradients=True)
def gradient_of_a_reflection(x):
    return F.pad(x, [-1, 0, 6, 6], mode="reflect")


@compiled(99686, noise(1, 8))
def split_and_cat_in_another_order(x):
    a, b, c = torch.split(x, [3, 2, 3], dim=1)
    return torch.cat([b, a, c], dim=1)


@compiled(98149, tensor([4], dtype=u8))
def power_of_bytes(x):
    return torch.cos(x.pow(5))


@compiled(94777, tensor(3.0))
def logarithm_before_a_write(x):
    y = torch.log(x)
    x.log_()
    return y
