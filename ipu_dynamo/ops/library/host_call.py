"""Define the operator that calls a Python function of the user's in the middle of a program.

A program names the function; this process knows it by that name for as long as somebody keeps it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from ipu_dynamo.ops.precision.narrowing import NARROW

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("host_call(Tensor[] tensors, str function, str[] results) -> Tensor[]")


@dataclass(eq=False)
class KnownFunction:
    """A function on CPU tensors, which one thread at a time calls.

    Args:
        name: in programs; unique among the registered functions.
        call: takes and returns tensors in a flat list.
    """

    name: str
    call: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    lock: RLock = field(default_factory=RLock)


_known: WeakValueDictionary[str, KnownFunction] = WeakValueDictionary()


def register(name: str, call: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> KnownFunction:
    """Make `call` known under `name`; if the name is taken, append a number to it."""
    names = itertools.chain([name], (f"{name}/{number}" for number in itertools.count(1)))
    function = KnownFunction(next(free for free in names if free not in _known), call)
    _known[function.name] = function
    return function


def layout(tensor: Tensor) -> str:
    """The dtype and shape of a result, as the operator has it: `float32[4,8]`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def _read(text: str) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return getattr(torch, dtype), tuple(int(size) for size in sizes.split(",") if size)


def _run(tensors: Sequence[Tensor], function: str, results: Sequence[str]) -> list[Tensor]:
    """Call a function with copies of its arguments, and copy its results.

    Raises:
        RuntimeError: it returns other shapes or types than it did when compiling.
    """
    known = _known.get(function)
    if known is None:
        raise RuntimeError(f"the host function {function} is not known to this process")
    device = tensors[0].device
    with known.lock:
        found = known.call([tensor.detach().to("cpu", copy=True) for tensor in tensors])
        made = [
            torch.empty(shape, dtype=dtype, device=device).copy_(value.detach())
            for value, (dtype, shape) in _checked(function, found, results)
        ]
    return made


def _checked(
    function: str, found: Sequence[Tensor], results: Sequence[str]
) -> list[tuple[Tensor, tuple[torch.dtype, tuple[int, ...]]]]:
    """Check results against the types and shapes of the compilation; return both in pairs."""
    if len(found) != len(results):
        raise RuntimeError(
            f"the host function {function} returned {len(found)} tensors, and {len(results)} when "
            "compiling"
        )
    pairs: list[tuple[Tensor, tuple[torch.dtype, tuple[int, ...]]]] = []
    for index, (value, text) in enumerate(zip(found, results, strict=True)):
        dtype, shape = _read(text)
        same = NARROW.get(value.dtype, value.dtype) == NARROW.get(dtype, dtype)
        if not same or value.shape != shape:
            raise RuntimeError(
                f"result {index} of the host function {function} is {layout(value)}, and was "
                f"{text} when compiling: shapes and types are those of the compilation"
            )
        pairs.append((value, (dtype, shape)))
    return pairs


def without_calling(
    tensors: Sequence[Tensor], function: str, results: Sequence[str]
) -> list[Tensor]:
    """Zeros of the shapes and types that the results have."""
    device = tensors[0].device
    known = map(_read, results)
    return [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in known]


_library.impl("host_call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::host_call", without_calling, lib=_library)
host_call = torch.ops.ipu.host_call.default
has_side_effect(host_call)  # the user's Python may have effects in addition to its results


def calls_host(node: fx.Node) -> bool:
    """Whether a node calls a function of the user's."""
    return node.target is host_call
