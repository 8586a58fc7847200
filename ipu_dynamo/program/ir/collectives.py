"""Define the instruction by which replicas exchange values within a micro-batch."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.ir.base_instruction import LOOP, BaseInstruction, Moved, Use
from ipu_dynamo.program.ir.types import TensorType

CollectiveKind = Literal["all_gather", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Collective(BaseInstruction):
    """Give each replica a result made of the values of its group, in ascending order.

    `all_gather` stacks them, `all_reduce` sums them along their tree, and `all_to_all` joins the
    parts r of all values on the r-th replica. It stands between two calls of a stage pass,
    and waits until each replica of the group has made its value of the same micro-batch.

    Args:
        type: of `value`.
        members: how many replicas take part: all, or with `groups` those of a group.
        source: the line of the user's model.
    """

    sections = LOOP
    done_by = "next there"

    kind: CollectiveKind
    value: str
    result: str
    type: TensorType
    members: int
    ipu: int
    source: str
    groups: ReplicaGroups | None = None

    @property
    def result_type(self) -> TensorType:
        """The type of `result`."""
        gathered = (self.members, *self.type.shape)
        return TensorType(self.type.dtype, gathered) if self.kind == "all_gather" else self.type

    @property
    def reads(self) -> tuple[Use, ...]:
        return (Use(self.value, self.ipu, self.type),)

    @property
    def makes(self) -> tuple[Use, ...]:
        return (Use(self.result, self.ipu, self.result_type),)

    @property
    def moves(self) -> tuple[Moved, ...]:
        """The values of other replicas, or its part of these."""
        others, shape = self.members - 1, self.type.shape
        if self.kind == "all_to_all" and shape:
            shape = (shape[0] // self.members, *shape[1:])
        received = TensorType(self.type.dtype, (others, *shape))
        sums = self.kind == "all_reduce"
        names = self.value, self.value
        return (Moved("exchanged", *names, "replicas", self.ipu, received, sums=sums),)

    def __str__(self) -> str:
        moved = f"%{self.result} = {self.kind} %{self.value}: {self.type}"
        over = f"{self.members} replicas" if self.groups is None else f"each {self.groups}"
        return f"{moved} over {over}, {self.nbytes} bytes  on ipu{self.ipu}"
