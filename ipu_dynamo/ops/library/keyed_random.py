"""Draw random numbers by a key that is a value of the model, such as a seed that it counts up.

The numbers depend only on the key, the replica and the element. No generator is read, and a program
draws the same numbers as the model alone. One key gives one draw: increment it before the next.
"""

from collections.abc import Sequence
from math import pi, prod

import torch
from torch import Tensor

from ipu_dynamo.ops.key_mixing import mix_bits, mixed_key

_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # of a fraction; float32 has 24
_MOST = 1 << 24  # values among which an integer is drawn

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("replica_index() -> Tensor")
_library.define("mix_key(Tensor key, Tensor replica) -> Tensor")


def _replica_index() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _mix_key(key: Tensor, replica: Tensor) -> Tensor:
    words = mixed_key([*key.tolist(), int(replica.item())])
    return torch.tensor(words, dtype=torch.int32, device=key.device)


def _mixed(key: Tensor, replica: Tensor) -> Tensor:
    return key.new_empty(2, dtype=torch.int32)


_library.impl("replica_index", _replica_index, "CompositeExplicitAutograd")
_library.impl("mix_key", _mix_key, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::replica_index", _replica_index, lib=_library)
torch.library.register_fake("ipu::mix_key", _mixed, lib=_library)


def replica_index() -> Tensor:
    """The number of the replica that computes this, from 0, as i64[]; 0 outside of a program."""
    index: Tensor = torch.ops.ipu.replica_index()
    return index


def keyed_uniform(
    key: Tensor,
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    replica: Tensor | None = None,
) -> Tensor:
    """Uniform numbers of [low, high), of at most 24 random bits.

    Args:
        key: integers, `[2]`: a seed and a count, for example.
        shape: of the result; several replicas draw different numbers of this shape.
        low: the least number.
        high: numbers are less.
        dtype: of the result, a floating-point type.
        replica: another index than `replica_index()`, which differs from replica to replica. In the
            body of a loop the index has to come from outside.

    Raises:
        ValueError: the key is not a tensor of two integers, or `dtype` is not a float type.
    """
    _check_floating(dtype)
    span = _fraction(key, shape, _DIGITS.get(dtype, 24), replica).mul(high - low)
    drawn = span.add(low).to(dtype)
    return torch.where(drawn >= high, low, drawn)  # rounding reaches the end


def keyed_normal(
    key: Tensor,
    shape: Sequence[int],
    mean: float = 0.0,
    deviation: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    replica: Tensor | None = None,
) -> Tensor:
    """Normal numbers, by the method of Box and Muller. Arguments as of `keyed_uniform`.

    Args:
        key: as for `keyed_uniform`.
        shape: as for `keyed_uniform`.
        mean: of the numbers.
        deviation: their standard deviation.
        dtype: as for `keyed_uniform`.
        replica: as for `keyed_uniform`.
    """
    _check_floating(dtype)
    positive = 1.0 - _fraction(key, shape, 24, replica, draw=0)  # of (0, 1]
    angle = _fraction(key, shape, 24, replica, draw=1) * (2 * pi)
    radius = positive.log().mul(-2.0).sqrt()
    return (radius * angle.cos()).mul(deviation).add(mean).to(dtype)


def keyed_bernoulli(
    key: Tensor,
    probability: float | Tensor,
    shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bool,
    replica: Tensor | None = None,
) -> Tensor:
    """1 with a probability, else 0.

    Args:
        key: as for `keyed_uniform`.
        probability: a number, or a tensor, of which each element is one.
        shape: of the result; None: that of `probability`.
        dtype: of the result.
        replica: as for `keyed_uniform`.

    Raises:
        ValueError: also if a number is not from 0 to 1, or has no shape.
    """
    if isinstance(probability, Tensor):
        size = probability.shape if shape is None else shape
        return (_fraction(key, size, 24, replica) < probability).to(dtype)
    if shape is None:
        raise ValueError("a probability that is a number needs a shape")
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"a probability of {probability}; it is from 0 to 1")
    return _happens(key, shape, probability, replica).to(dtype)


def keyed_randint(
    key: Tensor,
    low: int,
    high: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.int64,
    replica: Tensor | None = None,
) -> Tensor:
    """Integers of low to high - 1, of at most 2**24 values.

    Args:
        key: as for `keyed_uniform`.
        low: the least number.
        high: the greatest number is `high - 1`.
        shape: as for `keyed_uniform`.
        dtype: of the result, an integer type.
        replica: as for `keyed_uniform`.

    Raises:
        ValueError: also if there is no such integer, or there are more of them.
    """
    if not 0 < high - low <= _MOST:
        raise ValueError(f"integers of {low} to {high - 1}; from 1 to {_MOST} values can be drawn")
    scaled = _fraction(key, shape, 24, replica).mul(float(high - low)).floor()
    return scaled.to(torch.int64).add(low).to(dtype)


def keyed_dropout(
    x: Tensor,
    p: float,
    key: Tensor,
    *,
    shape: Sequence[int] | None = None,
    replica: Tensor | None = None,
) -> Tensor:
    """`x / (1 - p)`, with elements set to 0 with probability `p`; as differentiable as that.

    Args:
        x: a floating-point tensor.
        p: the probability, from 0 to 1.
        key: as for `keyed_uniform`.
        shape: shape of the mask, which is expanded to that of `x`; None: the shape of `x`.
        replica: as for `keyed_uniform`.

    Raises:
        ValueError: also if `p` is not from 0 to 1.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a dropout probability of {p}; it is from 0 to 1")
    mask = _happens(key, x.shape if shape is None else shape, 1.0 - p, replica)
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def _happens(
    key: Tensor, shape: Sequence[int], probability: float, replica: Tensor | None
) -> Tensor:
    """Booleans that are true with a probability, to 32 bits."""
    threshold = round(probability * 2**32) - 2**31
    bits = _bits(key, shape, replica)
    return bits >= -(1 << 31) if threshold >= 2**31 else bits < threshold


def _fraction(
    key: Tensor, shape: Sequence[int], digits: int, replica: Tensor | None, draw: int = 0
) -> Tensor:
    """Uniform float32 numbers k / 2**digits of [0, 1)."""
    top = (_bits(key, shape, replica, draw) >> (32 - digits)) & ((1 << digits) - 1)
    return top.to(torch.float32) * 2.0**-digits


def _bits(key: Tensor, shape: Sequence[int], replica: Tensor | None, draw: int = 0) -> Tensor:
    """Uniform 32-bit integers.

    Raises:
        ValueError: the key is no tensor of two integers.
    """
    if key.shape != (2,) or key.dtype.is_floating_point or key.dtype == torch.bool:
        raise ValueError(f"a key of shape {list(key.shape)} and {key.dtype}; it is two integers")
    index = replica_index() if replica is None else replica
    words = torch.ops.ipu.mix_key(key, index)
    value = torch.arange(prod(shape), dtype=torch.int32, device=key.device).view(tuple(shape))
    value = mix_bits(value + words[0])
    return mix_bits(value + (words[1] + draw))


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"numbers of {dtype}; they are of floating point")
