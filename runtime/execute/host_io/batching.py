"""Split a call's tensors into micro-batches, and put returned micro-batches together.

There are D device iterations, A accumulation steps, G input groups and R replicas, those of this
process. A call's input has D*A*G*B rows in the order [D, A, G, B]. Outputs have the order
[D, A, R, B].
Source: PopTorch user guide, "Device iterations", "Gradient accumulation", "Output modes".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, assert_never

import torch
from torch import Tensor

from ipu_dynamo.errors import InputError
from ipu_dynamo.program import Input, Output, Program, TensorType
from ipu_dynamo.program.schedule.sections import sections

ALIGNED = 64  # bytes: alignment of tensors by PyTorch's allocator


@dataclass(frozen=True)  # its counts are kept: every call asks for them
class Batching:
    """How many micro-batches a call has, and which replica gets which.

    Args:
        iterations: D.
        accumulation: A.
        replicas: R, of which the caller passes the rows.
        group_of: for each of them, the input group that it reads, numbered from 0.
    """

    iterations: int
    accumulation: int
    replicas: int
    group_of: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, replicas: int, group_of: Sequence[int] = ()) -> Self:
        """Read the numbers from the loops of `program`.

        Args:
            replicas: those that run here.
            group_of: for each of them, the input group that it reads; empty: its own.

        Raises:
            ValueError: there are more or fewer replicas.
        """
        cut = sections(program)
        group_of = tuple(group_of) or tuple(range(replicas))
        if len(group_of) != replicas:
            raise ValueError(f"{len(group_of)} replicas have input groups, {replicas} run")
        if program.kind == "training":
            return cls(cut.steps, cut.micro_batches, replicas, group_of)
        return cls(cut.micro_batches, 1, replicas, group_of)

    @cached_property
    def groups(self) -> int:
        return max(self.group_of) + 1

    @cached_property
    def splits(self) -> int:
        """Micro-batches in each input: D*A*G."""
        return self.iterations * self.accumulation * self.groups

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches that run in a call: D*A*R."""
        return self.iterations * self.accumulation * self.replicas

    def split(
        self, stream: Input, tensor: Tensor, device: torch.device | str | None = None
    ) -> Sequence[Tensor]:
        """The micro-batches of `tensor`, in the order [D, A, G]: views of it, or copies.

        PyTorch's libraries may give small products other bits where an operand does not begin at a
        multiple of 64 bytes. A micro-batch that does not is copied, so that no bit depends on its
        place in a call.

        Args:
            device: where it is brought first; None: it stays where it is.

        Raises:
            InputError: `tensor` has not the dtype, or not `splits` times the rows, of `stream`.
        """
        shape = stream.type.shape
        full = (self.splits * shape[0], *shape[1:]) if shape else ()
        if tensor.dtype != stream.type.dtype:
            raise InputError(
                f"Data type mismatch for {stream.name}: expected {stream.type.dtype} but got "
                f"{tensor.dtype}",
                hint="convert the tensor, or compile again for this type",
            )
        if tensor.shape != full:
            raise InputError(
                f"Shape mismatch for {stream.name}: expected {torch.Size(full)} but got "
                f"{tensor.shape}",
                hint="the program is compiled for one shape: drop or pad the last batch, or "
                "compile again for this one",
            )
        tensor = tensor.to(device)
        views = (tensor,) if self.splits == 1 else tensor.view(self.splits, *shape).unbind(0)
        return [view if view.data_ptr() % ALIGNED == 0 else _copy(view) for view in views]

    def of_replicas(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """The values of input groups, in the order [D, A, G], for every replica: [D, A, R]."""
        if self.groups == self.replicas:
            return values
        steps = range(self.iterations * self.accumulation)
        return [values[step * self.groups + group] for step in steps for group in self.group_of]

    def kept(self, output: Output) -> list[list[bool]]:
        """For each device iteration and accumulation step, whether its value is needed."""
        keep = []
        for iteration in range(self.iterations):
            last = iteration == self.iterations - 1
            row = []
            for step in range(self.accumulation):
                match output.returns:
                    case "all" | "sum":
                        needed = True
                    case "every":
                        needed = (iteration + 1) % output.period == 0
                    case "final":
                        needed = last and step == self.accumulation - 1
                    case "once":
                        needed = iteration == step == 0
                    case _:
                        assert_never(output.returns)
                row.append(needed)
            keep.append(row)
        return keep


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in its own memory, with the same strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((span if tensor.numel() else 0,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def micro_batch_size(name: str, shape: Sequence[int], splits: int) -> int:
    """Rows of one micro-batch of an input of `shape`.

    Raises:
        InputError: the rows do not divide into `splits` micro-batches.
    """
    rows = shape[0] if shape else 1
    if rows % splits:
        raise InputError(
            f"the {rows} rows of input {name}, of shape {list(shape)}, do not divide into "
            f"{splits} micro-batches",
            hint=f"rows must be a multiple of {splits}: device iterations x gradient accumulation "
            "x input groups",
        )
    return rows // splits


def join(output: Output, values: Sequence[Tensor], batching: Batching) -> Tensor:
    """The returned tensor, from the kept micro-batches in the order [D, A, R].

    `sum` adds up each replica's micro-batches and then keeps one per replica. Of a changed input
    the value of the first replica of each group is kept.
    """
    replicas = batching.replicas
    if not values:
        return torch.empty((0, *output.type.shape[1:]), dtype=output.type.dtype)
    if output.returns == "once":
        return values[0].clone()
    if output.returns == "sum":
        values = [_total(values[replica::replicas]) for replica in range(replicas)]
    if output.mutates and batching.groups != replicas:
        first = [batching.group_of.index(group) for group in range(batching.groups)]
        values = [values[start + r] for start in range(0, len(values), replicas) for r in first]
    if len(values) == 1:
        return values[0].contiguous()
    return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))


def joined_type(output: Output, batching: Batching) -> TensorType:
    """The type of the returned tensor."""
    count = sum(k for row in batching.kept(output) for k in row) * batching.replicas
    type_ = output.type
    values = [torch.empty(type_.shape, dtype=type_.dtype, device="meta")] * count
    return TensorType.of(join(output, values, batching))


def _total(values: Sequence[Tensor]) -> Tensor:
    """The sum in micro-batch order, in the values' own dtype."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
