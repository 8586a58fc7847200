"""List the functions of numpy that expressions may call, each with a bound of its result."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_dynamo.saved_model.feeds.limits import Refused, check_array_bytes, nested_size

_DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_"]
CONSTANTS: Mapping[str, Any] = {
    "np.pi": np.pi,
    "np.e": np.e,
    **{f"np.{name}": getattr(np, name) for name in _DTYPES},
}
_KINDS = frozenset(getattr(np, name) for name in _DTYPES)


def call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], part: str
) -> Any:
    """The result of a function of the list.

    Raises:
        Refused: its arguments do not fit, or the result would be too large.
    """
    try:
        return function(*args, **kwargs)
    except Refused as error:
        raise Refused(part, str(error).rpartition("': ")[2]) from error
    except (TypeError, ValueError, ArithmeticError, IndexError, MemoryError) as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise Refused(part, first) from error


def _shape(value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, list | tuple | np.ndarray) else [value]
    if any(not isinstance(size, int | np.integer) for size in sizes):
        raise ValueError(f"{value!r} is no shape")
    return tuple(int(size) for size in sizes)


def _bounded(value: Any) -> tuple[int, ...]:
    shape = _shape(value)
    check_array_bytes(shape, 8, "")
    return shape


def _dtype(value: Any) -> Any:
    if isinstance(value, str):
        value = getattr(np, value) if value in _DTYPES else value
    if value is not None and value not in _KINDS:
        raise ValueError(f"{value!r} is no type of the list")
    return value


def to_array(value: Any, part: str) -> Any:
    """A value of an expression as an array of numbers.

    Raises:
        Refused: it has others in it.
    """
    return call(_numbers, [value], {}, part)


def _numbers(value: Any) -> Any:
    """An argument that is numbers, or lists of them."""
    nested_size(value, "")
    if isinstance(value, np.random.Generator | type | str | None):
        raise ValueError("no number or array")
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError("lists of different lengths, or no numbers")
    return array


def _array(value: Any, dtype: Any = None) -> Any:
    return _numbers(value).astype(_dtype(dtype)) if dtype is not None else _numbers(value).copy()


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    def function(shape: Any, dtype: Any = None) -> Any:
        return make(_bounded(shape), dtype=_dtype(dtype))

    return function


def _full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
    return np.full(_bounded(shape), _numbers(fill_value), dtype=_dtype(dtype))


def _arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
    if any(not isinstance(value, int | float | np.number | None) for value in (start, stop, step)):
        raise ValueError("arange takes numbers")
    begin, end = (0, start) if stop is None else (start, stop)
    if not step:
        raise ValueError("a step of 0")
    length = (float(end) - float(begin)) / float(step)
    if not math.isfinite(length):
        raise ValueError("a range without an end")
    check_array_bytes((max(math.ceil(length), 0),), 8, "")
    return np.arange(begin, end, step, dtype=_dtype(dtype))


def _linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = None
) -> Any:
    low, high = _numbers(start), _numbers(stop)
    _bounded((num, *np.broadcast_shapes(low.shape, high.shape)))
    return np.linspace(low, high, num, endpoint=bool(endpoint), dtype=_dtype(dtype))


def _eye(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Any:
    rows, columns = _bounded((N, N if M is None else M))
    return np.eye(rows, columns, k, dtype=_dtype(dtype) or float)


def _rand(*shape: int) -> Any:
    return np.random.rand(*_bounded(shape))


def _randn(*shape: int) -> Any:
    return np.random.randn(*_bounded(shape))


def _randint(low: Any, high: Any = None, size: Any = None, dtype: Any = None) -> Any:
    shape = _drawn_shape(low, high, size)
    return np.random.randint(low, high, shape, dtype=_dtype(dtype) or np.int64)


def _drawn_shape(low: Any, high: Any, size: Any) -> tuple[int, ...] | None:
    """The shape that is asked for; bounded also where that of the limits takes its place."""
    limits = [_numbers(value).shape for value in (low, high) if value is not None]
    shape = None if size is None else _bounded(size)
    _bounded(np.broadcast_shapes(*limits, shape or ()))
    return shape


def _default_rng(seed: Any = None) -> np.random.Generator:
    if not isinstance(seed, int | None):
        raise ValueError("a seed is an integer")
    return np.random.default_rng(seed)


def _reshape(value: Any, *shape: Any, order: Any = None) -> Any:
    if order is not None:
        raise ValueError("reshape takes no order here")
    return _numbers(value).reshape(_shape(shape[0] if len(shape) == 1 else shape))


def _transpose(value: Any, axes: Any = None) -> Any:
    return np.transpose(_numbers(value), None if axes is None else _shape(axes))


def _astype(value: Any, dtype: Any) -> Any:
    if dtype is None:
        raise ValueError("no type of the list")
    return value.astype(_dtype(dtype))


def _drawn(name: str) -> Callable[..., Any]:
    def function(generator: np.random.Generator, size: Any = None) -> Any:
        return getattr(generator, name)(None if size is None else _bounded(size))

    return function


def _integers(generator: np.random.Generator, low: Any, high: Any = None, size: Any = None) -> Any:
    return generator.integers(low, high, _drawn_shape(low, high, size))


def _scalar(kind: Callable[..., Any]) -> Callable[..., Any]:
    def function(value: Any = 0) -> Any:
        # numpy looks whether a number of Python fits, and lets those of arrays wrap
        return kind(value if isinstance(value, int | float) else _numbers(value))

    return function


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: function(_numbers(value))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "np.array": _array,
    "np.asarray": _array,
    "np.ones": _filled(np.ones),
    "np.zeros": _filled(np.zeros),
    "np.full": _full,
    "np.arange": _arange,
    "np.linspace": _linspace,
    "np.eye": _eye,
    "np.random.rand": _rand,
    "np.random.randn": _randn,
    "np.random.randint": _randint,
    "np.random.default_rng": _default_rng,
    "np.sqrt": _of(np.sqrt),
    "np.exp": _of(np.exp),
    "np.reshape": _reshape,
    "np.transpose": _transpose,
    **{f"np.{name}": _scalar(getattr(np, name)) for name in _DTYPES},
}
METHODS: Mapping[str, Callable[..., Any]] = {"astype": _astype, "reshape": _reshape}
GENERATOR_METHODS: Mapping[str, Callable[..., Any]] = {
    "random": _drawn("random"),
    "standard_normal": _drawn("standard_normal"),
    "integers": _integers,
}
