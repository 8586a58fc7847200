"""Bring batches into one form, and compare each with the first one of the call."""

from collections.abc import Mapping
from typing import Any

import keras
import torch
from torch import Tensor

from ipu_dynamo.keras.private.keras_private import to_tensor

Batch = tuple[Any, Any, Any]
"""Inputs, targets and sample weights: tensors, nested as the model takes them, or None."""

_PARTS = ("x", "y", "sample_weight")


def normalised(data: Any, *, copy: bool) -> Batch:
    """A batch as programs take it: tensors, float64 as float32.

    Args:
        data: a batch of a data adapter or a user: `x`, or a tuple of up to three.
        copy: the source may write into the batch's memory again.
    """

    def leaf(value: Any) -> Any:
        if value is None:
            return None
        tensor = to_tensor(value)
        if tensor.dtype is torch.float64 and keras.config.floatx() != "float64":
            return tensor.float()
        return tensor.clone() if copy else tensor

    parts = keras.utils.unpack_x_y_sample_weight(data)
    x, y, sample_weight = (keras.tree.map_structure(leaf, part) for part in parts)
    return x, y, sample_weight


class OneForm:
    """Hold the batches of a call to the structure, shapes and types of the first one.

    Args:
        ends_partial: the last batch of an epoch may have fewer rows.
    """

    def __init__(self, *, ends_partial: bool = False) -> None:
        self._first: Mapping[tuple[Any, ...], Any] | None = None
        self._ends_partial = ends_partial
        self._last: tuple[int, int] | None = None  # number and rows of a partial batch

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._last = None

    def check(self, batch: Batch, number: int) -> None:
        """Compare a batch, which is number `number` of its epoch, from 0.

        Raises:
            ValueError: it has another form than the first batch of the call.
        """
        form = _form(batch)
        if self._first is None:
            self._first = form
        others = _rows(self._first)
        if self._last is not None:
            raise ValueError(partial_batch(*self._last, others))
        if form == self._first:
            return
        if self._ends_partial and 0 < _rows(form) < others and _are_rows(form, self._first):
            self._last = number, _rows(form)
            return
        if form.keys() != self._first.keys():
            present, first = (", ".join(map(_name, keys)) for keys in (form, self._first))
            raise ValueError(
                f"batch {number} consists of {present}, and the batches before it of {first}: "
                "all batches need one structure"
            )
        path = next(path for path in form if form[path] != self._first[path])
        problem = _difference(number, _name(path), form[path], self._first[path])
        raise ValueError(problem)


def partial_batch(number: int, rows: int, others: int) -> str:
    """The message for a batch with fewer rows than the ones before it."""
    return (
        f"batch {number} is a partial batch: it has {rows} rows, and the batches before it have "
        f"{others}. {_ONE_SHAPE}: choose a batch_size that divides the number of rows, pad the "
        "data, or leave the last rows out"
    )


def partial_data(rows: int, batch_size: int) -> str:
    """The message for arrays whose last batch is smaller."""
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    below = [size for size in sizes if size < batch_size][-2:]
    *others, last = map(str, [*below, *(size for size in sizes if size > batch_size)][:3])
    return (
        f"{rows} rows in batches of {batch_size} leave a partial batch of {rows % batch_size} over."
        f" {_ONE_SHAPE}: choose a batch_size that divides the rows, as {', '.join(others)} or "
        f"{last}, pad the data, or leave the last rows out"
    )


_ONE_SHAPE = (
    "Executions take batches of one shape; a smaller last one is possible with "
    "steps_per_execution=1, on one replica, without stages and gradient accumulation"
)


def _rows(form: Mapping[tuple[Any, ...], Any]) -> int:
    return next((shape[0] for shape, _ in form.values() if shape), 0)


def _are_rows(form: Mapping[tuple[Any, ...], Any], other: Mapping[tuple[Any, ...], Any]) -> bool:
    """Whether two forms differ in their numbers of rows only."""

    def rest(of: Mapping[tuple[Any, ...], Any]) -> Any:
        rows = _rows(of)
        return {p: (s[:1] == (rows,), s[1:], dtype) for p, (s, dtype) in of.items()}

    return bool(rest(form) == rest(other))


def _form(batch: Batch) -> Mapping[tuple[Any, ...], Any]:
    """Shape and type of each tensor, by its path."""
    leaves = keras.tree.flatten_with_path(batch)
    return {tuple(path): _of_leaf(value) for path, value in leaves if value is not None}


def _of_leaf(value: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def _name(path: tuple[Any, ...]) -> str:
    return _PARTS[path[0]] + "".join(f"[{key!r}]" for key in path[1:])


def _difference(number: int, name: str, form: Any, first: Any) -> str:
    (shape, dtype), (first_shape, first_dtype) = form, first
    if shape and first_shape and shape[1:] == first_shape[1:] and shape[0] < first_shape[0]:
        return partial_batch(number, shape[0], first_shape[0])
    if shape != first_shape:
        return (
            f"{name} of batch {number} has the shape {shape}, and in the batches before it "
            f"{first_shape}: all batches need one shape; pad them to it"
        )
    return (
        f"{name} of batch {number} has the type {dtype}, and in the batches before it "
        f"{first_dtype}: all batches need one type"
    )
