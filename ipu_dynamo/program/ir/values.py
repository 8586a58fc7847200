"""Describe the values outside of instructions: variables, and streams to the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ipu_dynamo.ops.marks.overlap import Overlap
from ipu_dynamo.ops.marks.print_tensor import Printing
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.ir.types import TensorType

_GENERATED = {
    "host": "",
    "accumulation": "  1 / (k + 1) at accumulation step k",
    "replica": "  the index of the replica",
    "random": "  from seed, step, micro-batch and replica",
}
_OVERLAPPING = {
    "no_overlap": "",
    "accumulation_loop": "  overlapped in the accumulation loop",
    "device_iteration_loop": "  overlapped in the loop over device iterations",
}
Kind = Literal["parameter", "buffer", "constant", "whole", "accumulator", "state", "loss_scale"]
Returns = Literal["all", "every", "final", "sum", "once"]


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor that lives as long as the program.

    Args:
        name: in the user's module, or a made one (`fc1.weight..exp_avg`; `made_names.py`).
        type: dtype and shape on one replica.
        kind: its role; a `whole` tensor comes with a call, the same for its micro-batches.
            `loss_scale` is the factor on the loss, or a state that decides about the next one.
        ipu: its owner.
        replicated: every replica holds the same values, so one copy serves all replicas of a
            device. Accumulators and buffers differ between replicas.
        digest: of the values, for a constant.
        off_chip: it is in streaming memory; its owner has it between a load and a store, or
            the end of the call that it is loaded for.
        groups: of `replicated`, only the replicas of a group hold the same values; None: all do.
            On the host there is a leading dimension over the groups.
        shards: how many replicas, all of a group, hold one part each, instead of the whole. They
            have it whole between a gather and the end of the call that it is gathered for.
        strides: in elements, of the whole; None: it is dense.
    """

    name: str
    type: TensorType
    kind: Kind
    ipu: int
    replicated: bool = True
    digest: str = ""
    off_chip: bool = False
    groups: ReplicaGroups | None = None
    shards: int = 1
    strides: tuple[int, ...] | None = None

    @property
    def held(self) -> TensorType:
        """The type of one replica's part: the whole, or a shard."""
        return self.type.shard(self.shards)

    def __str__(self) -> str:
        own = "" if self.replicated else ", one per replica"
        if self.groups is not None:
            own = f", one per {self.groups}"
        if self.shards > 1:
            own += f", in {self.shards} shards of {self.held}"
        where = "off chip, of" if self.off_chip else "on"
        values = f", values {self.digest}" if self.digest else ""
        order = "" if self.strides is None else f"{{{','.join(map(str, self.strides))}}}"
        return f"{self.kind} %{self.name}: {self.type}{order}  {where} ipu{self.ipu}{own}{values}"


@dataclass(frozen=True, slots=True)
class Input:
    """A stream to the IPUs, of one tensor of `type` per replica and micro-batch.

    Args:
        name: the argument's name with its path, as in `batch['x'][0]`.
        type: dtype and shape of one micro-batch.
        dim: along which the caller's tensor is cut into micro-batches.
        outer: the dimension repeats all rows so often, and a micro-batch has a block of each.
        source: the caller's `host` tensor; or 1 / (k + 1) at `accumulation` step k; or a new key
            for `random` numbers, on every replica; or the index of the `replica`.
        overlap: the loop within which a micro-batch is transferred while the one before computes.
    """

    name: str
    type: TensorType
    source: Literal["host", "accumulation", "random", "replica"] = "host"
    dim: int = 0
    outer: int = 1
    overlap: Overlap = "no_overlap"

    def __str__(self) -> str:
        along = f"  {_along(self)}" if _along(self) else ""
        overlap = _OVERLAPPING[self.overlap]
        return f"input %{self.name}: {self.type}{_GENERATED[self.source]}{along}{overlap}"


@dataclass(frozen=True, slots=True)
class Output:
    """A stream to the host.

    Args:
        name: position in the returned structure (`0`, `1`, ...), or the name of the input that
            the model changed in place.
        type: dtype and shape of one micro-batch.
        returns: which micro-batches reach the host: `all`; `every` n-th device iteration;
            the `final` one; the `sum` of all; `once` for a value that no input reaches.
        period: the n of `every`, in device iterations.
        mutates: the input that receives the value, instead of the returned structure.
        dim, outer: how micro-batches are joined, as in `Input`.
        overlap: the loop within which a micro-batch is transferred while the next one computes.
        printing: the host prints each micro-batch, and returns none.
    """

    name: str
    type: TensorType
    returns: Returns
    period: int = 1
    mutates: bool = False
    dim: int = 0
    outer: int = 1
    overlap: Overlap = "no_overlap"
    printing: Printing | None = None

    def __str__(self) -> str:
        if self.printing is not None:
            return f"output %{self.name}: {self.type}  print {self.printing.title!r}"
        rule = f"every {self.period}" if self.returns == "every" else self.returns
        rule = f"{rule} {_along(self)}".rstrip()
        kind = "written back to input" if self.mutates else "output"
        overlap = _OVERLAPPING[self.overlap]
        return f"{kind} %{self.name}: {self.type}  return {rule}{overlap}"


def blocks(tensor: Tensor, dim: int, outer: int, count: int) -> Sequence[Tensor]:
    """The `count` micro-batches of a tensor: views, or copies where its rows are repeated."""
    if outer == 1:
        return tensor.tensor_split(count, dim)
    parts = tensor.unflatten(dim, (outer, -1)).tensor_split(count, dim + 1)
    return [part.flatten(dim, dim + 1).contiguous() for part in parts]


def _along(stream: Input | Output) -> str:
    repeated = f", repeated {stream.outer} times" if stream.outer > 1 else ""
    return f"along dim {stream.dim}{repeated}" if stream.dim or repeated else ""
