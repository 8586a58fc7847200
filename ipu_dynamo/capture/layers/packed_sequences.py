"""Pack sequences of different lengths without leaving anything out, while a model is traced.

A packed sequence of PyTorch has one row for each step of each sequence. Their number is not known
at compile time. Here it holds the padded batch, `[steps * batch, size]`, and the lengths. Recurrent
layers and `pad_packed_sequence` can handle this form. Other operators would take padding for data,
and are refused.

Lengths are checked as eager PyTorch checks them, but when the program runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import pack_padded_sequence, pad_packed_sequence
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import pytree

_HARMLESS = {  # they say nothing of rows
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "ndim")),
}


class PaddedSteps(int):
    """How many steps the padded batch has, where eager PyTorch has those of the longest one."""


@dataclass(frozen=True)
class Packed:
    """The padded batch that a packed sequence stands for.

    Args:
        rows: stands for its data, `[steps * batch, ...]`.
        sizes: stands for its batch sizes, `[steps]`.
        lengths: how many steps each sequence has, `[batch]`.
    """

    rows: Tensor
    sizes: Tensor
    lengths: Tensor
    steps: int
    batch: int

    @property
    def padded(self) -> Tensor:
        """`[steps, batch, ...]`."""
        return self.rows.view(self.steps, self.batch, *self.rows.shape[1:])


class PackedSequences:
    """The packed sequences of one model.

    Invariant: it keeps references to its tensors, so that their identities are not used again.
    """

    def __init__(self) -> None:
        self._by_rows: dict[int, Packed] = {}
        self._by_sizes: dict[int, Packed] = {}

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `func`, whose arguments may contain packed sequences.

        Raises:
            CompileError: it would take padding for data.
        """
        if func is pack_padded_sequence:
            return self._pack_padded(*args, **kwargs)
        if func is pad_packed_sequence:
            return self._pad_packed(*args, **kwargs)
        if self._by_rows and func not in _HARMLESS:
            if args and (packed := self._by_sizes.get(id(args[0]))):
                return _of_sizes(packed, func, args[1:])
            last = func is torch.Tensor.size and args[1:] == (-1,)
            if not last and self.holds(pytree.tree_leaves((args, kwargs))):
                _refuse()
        return func(*args, **kwargs)

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether a packed sequence, or a part of one, is among `values`."""
        return any(id(value) in known for value in values for known in self._known)

    @property
    def _known(self) -> tuple[dict[int, Packed], dict[int, Packed]]:
        return self._by_rows, self._by_sizes

    def of(self, rows: Tensor, sizes: Tensor) -> Packed:
        """The packed sequence to which two tensors, data and batch sizes, belong."""
        packed, other = self._by_rows.get(id(rows)), self._by_sizes.get(id(sizes))
        if packed is None or other is None or packed.lengths is not other.lengths:
            _refuse()
        return packed

    def refuse_returned(self, values: Sequence[Any]) -> None:
        """Raise CompileError if the model returns a packed sequence, or a part of one."""
        if self.holds(values):
            raise CompileError(
                "the model returns a packed sequence, whose length is known only when it runs",
                hint="return what pad_packed_sequence gives of it",
                id="value",
            )

    def like(self, packed: Packed, padded: Tensor) -> Tensor:
        """Another `padded` batch of the same lengths: the rows that stand for its data."""
        rows = padded.reshape(packed.steps * packed.batch, *padded.shape[2:])
        self._by_rows[id(rows)] = Packed(
            rows, packed.sizes, packed.lengths, packed.steps, packed.batch
        )
        return rows

    def _pack_padded(
        self, padded: Tensor, lengths: Tensor, batch_first: bool = False
    ) -> tuple[Tensor, Tensor]:
        padded = padded.transpose(0, 1) if batch_first else padded
        steps, batch = padded.shape[:2]
        if lengths.shape != (batch,):
            raise RuntimeError(f"{list(lengths.shape)} lengths for a batch of {batch} sequences")
        lengths = lengths.to(padded.device)
        aten._assert_async.msg(
            ((lengths > 0) & (lengths <= steps)).all(),
            f"pack_padded_sequence: lengths have to be from 1 to {steps}",
        )
        aten._assert_async.msg(
            (lengths[1:] <= lengths[:-1]).all(),
            "pack_padded_sequence: with enforce_sorted=True the longest sequence has to be first",
        )
        sizes = torch.zeros(steps, dtype=torch.int64, device="cpu")  # where PyTorch demands them
        packed = Packed(padded.reshape(-1, *padded.shape[2:]), sizes, lengths, steps, batch)
        self._by_sizes[id(sizes)] = packed
        return self.like(packed, padded), sizes

    def _pad_packed(
        self,
        rows: Tensor,
        sizes: Tensor,
        batch_first: bool,
        padding_value: float,
        total_length: int,
    ) -> tuple[Tensor, Tensor]:
        packed = self.of(rows, sizes)
        padded, lengths, steps = packed.padded, packed.lengths, packed.steps
        if isinstance(total_length, PaddedSteps):
            aten._assert_async.msg(
                (lengths == steps).any(),
                f"pad_packed_sequence: no sequence has all {steps} steps, and a program does not "
                f"change its shapes; say total_length={steps}",
            )
        inside = torch.arange(steps, device=padded.device)[:, None] < lengths
        inside = inside.view(*inside.shape, *[1] * (padded.dim() - 2))
        padded = torch.where(inside, padded, padding_value)
        if total_length > steps:
            more = padded.new_full((total_length - steps, *padded.shape[1:]), padding_value)
            padded = torch.cat((padded, more))
        return padded.transpose(0, 1) if batch_first else padded, lengths


def _of_sizes(packed: Packed, func: Callable[..., Any], rest: Sequence[Any]) -> Any:
    """Read the known facts of batch sizes: the first one, and how many there are."""
    if func is torch.Tensor.__getitem__ and rest == (0,):
        return packed.batch
    if func is torch.Tensor.size and rest == (0,):
        return PaddedSteps(packed.steps)
    _refuse()


def _refuse() -> Never:
    raise CompileError(
        "the rows of a packed sequence are known only when the model runs",
        where=called_from(),
        hint="give it to a recurrent layer or to pad_packed_sequence, compute on what that "
        "returns, and pack sequences inside the model",
        id="value",
    )
