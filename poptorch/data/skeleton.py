"""Take the tensors out of an item, and put others in their place in another process."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def taken_apart(item: Any, tensors: Sequence[Tensor]) -> bytes:
    """Everything that `item` is but for `tensors`, which it holds."""
    buffer = io.BytesIO()
    _Pickler(buffer, tensors).dump(item)
    return buffer.getvalue()


def put_together(skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
    """An item like that which was taken apart, with other tensors."""
    return _Unpickler(io.BytesIO(skeleton), tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._places.get(id(obj)) if isinstance(obj, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
