"""Define the streams between ranks, which replace copies in the share of a rank.

A copy of the whole program may go from an IPU of one rank to an IPU of another. It becomes a
`SendToRank` in the first one's share, and a `ReceiveFromRank` in the other's. Both have the number
of the copy.
"""

from dataclasses import dataclass

from ipu_dynamo.program.ir.base_instruction import AFTER, BEFORE, LOOP, BaseInstruction, Use
from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class SendToRank(BaseInstruction):
    """Send a value to the rank of another IPU. Never waits.

    Args:
        wire: number of the copy among the instructions of a step of the whole program.
        to: the other IPU.
        each: each replica has a value of its own; else the replicas of a rank share one.
    """

    sections = BEFORE | LOOP | AFTER

    wire: int
    value: str
    type: TensorType
    ipu: int
    to: int
    each: bool
    source: str

    @property
    def reads(self) -> tuple[Use, ...]:
        return (Use(self.value, self.ipu, self.type),)

    def __str__(self) -> str:
        what = f"wire {self.wire} = %{self.value}: {self.type}, {self.type.nbytes} bytes"
        return f"send {what}{_times(self.each)} to the rank of IPU {self.to}  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class ReceiveFromRank(BaseInstruction):
    """Take a value that the rank of another IPU has sent.

    Args:
        wire, each: those of `SendToRank`.
        origin: the other IPU.
        strides: in elements; None: it is dense, or its message says them.
    """

    sections = BEFORE | LOOP | AFTER
    done_by = "next there"

    wire: int
    result: str
    type: TensorType
    ipu: int
    origin: int
    each: bool
    source: str
    strides: tuple[int, ...] | None = None

    @property
    def makes(self) -> tuple[Use, ...]:
        return (Use(self.result, self.ipu, self.type),)

    def __str__(self) -> str:
        what = f"%{self.result} = wire {self.wire}: {self.type}, {self.type.nbytes} bytes"
        origin = f"from the rank of IPU {self.origin}"
        return f"receive {what}{_times(self.each)} {origin}  on ipu{self.ipu}"


def _times(each: bool) -> str:
    return " for each replica" if each else ""
