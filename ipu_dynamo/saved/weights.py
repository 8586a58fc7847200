"""Keep tensors once each, with all that points to them: tied weights, views, copies of replicas.

A contiguous tensor with memory of its own is saved as it is. Of others the memory is saved, and how
each tensor lies in it: so strides last, and what shares memory shares it again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ipu_dynamo.program.ir.types import DTYPES
from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import check_dtype

Part = Literal["weights", "optimizer"]  # the members that tensors are in
_BYTES = 16  # saved memory begins at multiples of this, so that every dtype is aligned


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in saved memory.

    Args:
        of: the memory, a tensor of bytes.
        stride: in elements.
        offset: in bytes.
    """

    of: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class TensorTable:
    """Tensors that are to be saved.

    Invariant: equal keys stand for the same memory in the same layout.
    """

    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _parts: dict[str, Part] = field(default_factory=dict)
    _keys: dict[object, str] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, part: Part) -> str:
        """Have a tensor saved; return its key, which is that of the same tensor added before.

        Raises:
            SavedProgramError: it has no memory, or a dtype that files do not have.
        """
        check_tensor(name, tensor)
        tensor = tensor.detach()
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        same = place if tensor.numel() else id(tensor)
        if same in self._keys:
            return self._keys[same]
        key, count = name, 1
        while key in self._tensors:
            count += 1
            key = f"{name}~{count}"
        self._keys[same] = key
        self._tensors[key], self._parts[key] = tensor, part
        return key

    def finish(self) -> tuple[dict[Part, dict[str, Tensor]], dict[str, Any]]:
        """What to write into each member, and the table of views as JSON."""
        members: dict[Part, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
        views = {}
        for keys in self._sharing():
            first = self._tensors[keys[0]]
            member = members[self._parts[keys[0]]]
            if len(keys) == 1 and first.is_contiguous():
                member[keys[0]] = first
                continue
            begin = min(_begin(self._tensors[key]) for key in keys) // _BYTES * _BYTES
            end = max(_end(self._tensors[key]) for key in keys)
            memory = f"{keys[0]}~memory"
            member[memory] = _memory(first, begin, end)
            for key in keys:
                tensor = self._tensors[key]
                views[key] = {
                    "of": memory,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "stride": list(tensor.stride()),
                    "offset": _begin(tensor) - begin,
                }
        return members, views

    def _sharing(self) -> Iterable[list[str]]:
        """The keys of tensors that overlap, together."""
        storages: dict[object, list[str]] = {}
        for key, tensor in self._tensors.items():
            own = tensor.untyped_storage().data_ptr() if tensor.numel() else key
            storages.setdefault(own, []).append(key)
        for keys in storages.values():
            keys.sort(key=lambda key: _begin(self._tensors[key]))
            together, end = [keys[0]], _end(self._tensors[keys[0]])
            for key in keys[1:]:
                if _begin(self._tensors[key]) >= end:
                    yield together
                    together = []
                together.append(key)
                end = max(end, _end(self._tensors[key]))
            yield together


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise SavedProgramError for a tensor without memory, or of a dtype that files do not have."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        problem = f"it is {tensor.layout} on {tensor.device}"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, part=name)
    check_dtype(name, tensor.dtype)


def with_views(tensors: Mapping[str, Tensor], views: Any) -> dict[str, Tensor]:
    """Saved tensors by key, those included that lie in saved memory.

    Args:
        views: the table that `finish` gave, as JSON.

    Raises:
        SavedProgramError: the table is malformed, or a view reaches out of the memory.
    """
    by_key = dict(tensors)
    for key, written in expect(views, dict, "views").items():
        view = _read_view(key, written)
        memory = tensors.get(view.of)
        if memory is None or memory.dtype != torch.uint8 or key in tensors:
            raise SavedProgramError(Reason.CONTENT, f"{key} lies in {view.of}, which is no memory")
        reach = 1 + sum(
            (size - 1) * step for size, step in zip(view.shape, view.stride, strict=True)
        )
        reach = reach if all(view.shape) else 0
        if view.offset % view.dtype.itemsize or (
            view.offset + reach * view.dtype.itemsize > memory.numel()
        ):
            raise SavedProgramError(Reason.CONTENT, f"{key} reaches out of the memory {view.of}")
        by_key[key] = torch.empty(0, dtype=view.dtype).set_(
            memory.untyped_storage(),
            view.offset // view.dtype.itemsize,
            view.shape,
            view.stride,
        )
    return by_key


def _read_view(key: str, written: Any) -> View:
    of, dtype, shape, stride, offset = fields_of(
        written, f"view {key}", of=str, dtype=str, shape=list, stride=list, offset=int
    )
    numbers = [*shape, *stride, offset]
    plain = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    if not plain or len(shape) != len(stride) or len(shape) > 64 or dtype not in DTYPES:
        raise SavedProgramError(Reason.CONTENT, f"not a view: {key}")
    if prod(max(n, 1) for n in shape) >= 1 << 62:
        raise SavedProgramError(Reason.LIMIT, f"{key} is too large for any machine")
    return View(of, DTYPES[dtype], tuple(shape), tuple(stride), offset)


def _begin(tensor: Tensor) -> int:
    """Where a tensor's first element lies in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _end(tensor: Tensor) -> int:
    """Where its memory ends."""
    if not tensor.numel():
        return _begin(tensor)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((int(size) - 1) * int(step) for size, step in pairs)
    return _begin(tensor) + (last + 1) * tensor.dtype.itemsize


def _memory(tensor: Tensor, begin: int, end: int) -> Tensor:
    """The bytes of a tensor's storage from `begin` to `end`."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))
