"""Hold the kinds of layers that drawn models are made of.

A layer maps two values of shape [rows, width] and indices [rows] below `width` to one value of
that shape. An exact kind maps small integers to small integers, and so do its gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ipu_dynamo.ops.marks.serialized import Mode, serialized_matmul

Run = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer.

    Args:
        run: computes the layer from the module of `make`, two values, and indices.
        make: makes the module with the layer's weights, for a width.
        exact: whether integers give integers.
        random: whether it draws random numbers, which plain PyTorch draws otherwise.
    """

    run: Run
    make: Callable[[int], nn.Module] | None = None
    exact: bool = False
    random: bool = False


class Memory(nn.Module):
    """Hold buffers that a model changes: an integer, and one of floating-point numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count: Tensor
        self.value: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("value", torch.zeros(width))


class Scalars(nn.Module):
    """Hold parameters of no dimension, of one element, and of none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scalar, self.single = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0))


class Twice(torch.autograd.Function):
    """Double a value; the gradient is tripled, to show that this backward is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


def add_scalars(scalars: Scalars, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    return x + scalars.scalar - scalars.single * 2 + scalars.empty.sum()


def count(memory: Memory, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    memory.count += 1
    return x + memory.count


def average(memory: Memory, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    before = x - memory.value
    memory.value.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
    return before + memory.value


def remember(memory: Memory, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Read a buffer, then overwrite it through a view of it."""
    result = x + memory.value
    memory.value.view(1, -1)[0].copy_(x.detach()[0])
    return result


def write_slices(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result = x.clone()
    result[:, 0] = y[:, -1]
    result[-1:].mul_(2)
    return result


def accumulate(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Change a tensor of which a view is returned."""
    total = x * 1
    seen = total.view(-1).view(x.shape)
    total.add_(y).relu_()
    return seen


def change(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Change a value that earlier layers, or the caller, hold."""
    return x.add_(y.detach().clamp(-1, 1))


def exchange_halves(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    left, right = x.tensor_split(2, dim=1)
    return torch.cat((right, left), 1)


def pick_largest(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    values, _indices = x.max(1, keepdim=True)
    return y + values


def look_up_largest(table: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    return y + F.embedding(x.argmax(1), table.weight)


def without_gradient(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        largest = y.amax(0).clamp(-2, 2)
    return x * largest


def attention(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    query, key = x.unsqueeze(0), y.unsqueeze(0)
    return x + F.scaled_dot_product_attention(query, key, query).squeeze(0)


def convolve(convolution: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result: Tensor = convolution(torch.stack((x, y), 1))
    return result.mean(1)


def checkpointed(layer: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda a, b: layer(a).relu() - b, x, y, use_reentrant=False)
    return result


def add_rows(_: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Add rows of one value to rows of another; several to the same."""
    return x.index_add(0, ids.clamp(max=len(x) - 1), y)


def recur(lstm: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Take rows for time steps."""
    result: Tensor = lstm(x.unsqueeze(1))[0]
    return result.squeeze(1) - y


def in_bfloat16(layer: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x.detach())
    rounded: Tensor = result.detach().to(x.dtype)
    return y + rounded


def _serialized(mode: Mode) -> LayerKind:
    """A product in two parts, or in one where there is no more to split."""

    def run(table: Any, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        parts = 2 if mode == "input_channels" else min(2, x.shape[1])
        return serialized_matmul(x, table.weight.t(), mode, parts)

    return LayerKind(run, lambda w: nn.Embedding(w, w), exact=True)


def _frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


KINDS: dict[str, LayerKind] = {
    "linear": LayerKind(lambda m, x, y, i: m(x), lambda w: nn.Linear(w, w), exact=True),
    "add": LayerKind(lambda _, x, y, i: x + y, exact=True),
    "relu": LayerKind(lambda _, x, y, i: x.relu(), exact=True),
    "multiply": LayerKind(lambda _, x, y, i: x.clamp(-2, 2) * y.clamp(-2, 2), exact=True),
    "add_scalars": LayerKind(add_scalars, Scalars, exact=True),
    "join": LayerKind(
        lambda m, x, y, i: m(torch.cat((x, y), 1)), lambda w: nn.Linear(2 * w, w), exact=True
    ),
    "frozen": LayerKind(lambda m, x, y, i: m(x), _frozen, exact=True),
    "embedding": LayerKind(lambda m, x, y, i: x + m(i), lambda w: nn.Embedding(w, w), exact=True),
    "unembedding": LayerKind(
        lambda m, x, y, i: x @ m.weight.t(), lambda w: nn.Embedding(w, w), exact=True
    ),
    "serialized_rows": _serialized("input_channels"),
    "serialized_sum": _serialized("reducing_dim"),
    "serialized_columns": _serialized("output_channels"),
    "checkpoint": LayerKind(checkpointed, lambda w: nn.Linear(w, w), exact=True),
    "autocast": LayerKind(in_bfloat16, lambda w: nn.Linear(w, w), exact=True),
    "add_rows": LayerKind(add_rows, exact=True),
    "numbers": LayerKind(lambda _, x, y, i: x + (i[:, None] - 1) * y, exact=True),
    "detach": LayerKind(lambda _, x, y, i: x - y.detach(), exact=True),
    "without_gradient": LayerKind(without_gradient, exact=True),
    "flip": LayerKind(lambda _, x, y, i: x.flip(1) - y.t().contiguous().t(), exact=True),
    "exchange_halves": LayerKind(exchange_halves, exact=True),
    "write_slices": LayerKind(write_slices, exact=True),
    "accumulate": LayerKind(accumulate, exact=True),
    "change": LayerKind(change, exact=True),
    "gather": LayerKind(lambda _, x, y, i: x.gather(1, i[:, None].expand_as(x)) + y, exact=True),
    "pick_largest": LayerKind(pick_largest, exact=True),
    "look_up_largest": LayerKind(look_up_largest, lambda w: nn.Embedding(w, w), exact=True),
    "constant": LayerKind(
        lambda _, x, y, i: x + torch.arange(x.shape[1]) - torch.tensor(1.0), exact=True
    ),
    "double": LayerKind(lambda _, x, y, i: (x.double() - y.double()).to(x.dtype), exact=True),
    "half": LayerKind(lambda _, x, y, i: x + y.detach().half().mul(2).to(x.dtype), exact=True),
    "compare": LayerKind(lambda _, x, y, i: torch.where(x > y, x, -y), exact=True),
    "count": LayerKind(count, Memory, exact=True),
    "remember": LayerKind(remember, Memory, exact=True),
    "function": LayerKind(
        lambda _, x, y, i: Twice.apply(x) - y,  # type: ignore[no-untyped-call]
        exact=True,
    ),
    "dropout": LayerKind(lambda m, x, y, i: m(x), lambda w: nn.Dropout(0.5).eval(), exact=True),
    "sort": LayerKind(lambda _, x, y, i: x.sort(1, descending=True).values - y),
    "variance": LayerKind(lambda _, x, y, i: x / (1 + y.var(1, keepdim=True, unbiased=False))),
    "lstm": LayerKind(recur, lambda w: nn.LSTM(w, w)),
    "tanh": LayerKind(lambda _, x, y, i: x.tanh()),
    "gelu": LayerKind(lambda _, x, y, i: F.gelu(x)),
    "softmax": LayerKind(lambda _, x, y, i: x.softmax(1) - y),
    "layer_norm": LayerKind(lambda m, x, y, i: m(x), lambda w: nn.LayerNorm(w, eps=0.1)),
    "batch_norm": LayerKind(lambda m, x, y, i: m(x), lambda w: nn.BatchNorm1d(w, eps=0.1)),
    "convolve": LayerKind(convolve, lambda w: nn.Conv1d(2, 2, 3, padding=1)),
    "attention": LayerKind(attention),
    "average": LayerKind(average, Memory),
    "drop": LayerKind(lambda _, x, y, i: F.dropout(x, 0.5), random=True),
    "noise": LayerKind(
        lambda _, x, y, i: x + torch.rand_like(x) - torch.randn_like(y), random=True
    ),
}
BUFFERED = frozenset({"batch_norm", "average", "count", "remember"})  # training changes them
TIED = frozenset(
    {
        "linear",
        "embedding",
        "unembedding",
        "serialized_rows",
        "serialized_columns",
        "look_up_largest",
        "checkpoint",
    }
)  # weight [width, width]
