"""Describe what a program holds between instructions: variables, and streams to the host."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.program.replica_groups import ReplicaGroups
from ipu_dynamo.program.types import TensorType

_GENERATED = {
    "host": "",
    "accumulation": "  1 / (k + 1) at accumulation step k",
    "random": "  from seed, call, micro-batch and replica",
}
Kind = Literal["parameter", "buffer", "constant", "accumulator", "state"]
Returns = Literal["all", "every", "final", "sum", "once"]


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor that lives as long as the program.

    Args:
        name: name in the user's module, or derived from it (`fc1.weight.exp_avg`).
        type: dtype and shape on one replica.
        kind: what it is for.
        ipu: its home.
        replicated: every replica holds the same values, so one copy serves all replicas of a
            device. Accumulators and buffers differ between replicas.
        digest: of the values, for a constant.
        groups: of `replicated`, only the replicas of a group hold the same values; None: all do.
            On the host there is a leading dimension over the groups.
    """

    name: str
    type: TensorType
    kind: Kind
    ipu: int
    replicated: bool = True
    digest: str = ""
    groups: ReplicaGroups | None = None

    def __str__(self) -> str:
        own = "" if self.replicated else ", one per replica"
        if self.groups is not None:
            own = f", one per {self.groups}"
        values = f", values {self.digest}" if self.digest else ""
        return f"{self.kind} %{self.name}: {self.type}  on ipu{self.ipu}{own}{values}"


@dataclass(frozen=True, slots=True)
class Input:
    """A stream to the IPUs, of one tensor of `type` per replica and micro-batch.

    Args:
        name: the argument's name with its path, as in `batch['x'][0]`.
        type: dtype and shape of one micro-batch.
        source: the caller's `host` tensor; or 1 / (k + 1) at `accumulation` step k; or a new key
            for `random` numbers, on every replica.
    """

    name: str
    type: TensorType
    source: Literal["host", "accumulation", "random"] = "host"

    def __str__(self) -> str:
        return f"input %{self.name}: {self.type}{_GENERATED[self.source]}"


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
    """

    name: str
    type: TensorType
    returns: Returns
    period: int = 1
    mutates: bool = False

    def __str__(self) -> str:
        rule = f"every {self.period}" if self.returns == "every" else self.returns
        kind = "written back to input" if self.mutates else "output"
        return f"{kind} %{self.name}: {self.type}  return {rule}"
