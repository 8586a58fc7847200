"""Define the liveness of a program: for each IPU its steps, and when each tensor is live."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

Role = Literal["weight", "accumulator", "state", "constant", "stream", "stash", "activation"]
ROLES: tuple[Role, ...] = get_args(Role)
# of memory, on IPUs and on this computer
CategoryName = Literal[
    "weights",
    "accumulators",
    "optimiser state",
    "stash and stream buffers",
    "constants and seeds",
    "vertex state and code",
    "exchange and control code",
    "activations",
    "temporaries",
]
CATEGORIES: tuple[CategoryName, ...] = get_args(CategoryName)
CATEGORY_OF: Mapping[Role, CategoryName] = {
    "weight": "weights",
    "accumulator": "accumulators",
    "state": "optimiser state",
    "stash": "stash and stream buffers",
    "stream": "stash and stream buffers",
    "constant": "constants and seeds",
    "activation": "activations",
}
Span = tuple[int, int]  # the first and the last step


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One thing that an IPU does.

    Args:
        number: of the instruction.
        name: of the operator with its overload, or of the instruction.
        source: the user's line, or empty.
        micro_batch: of those that the IPU works on in turn; -1: the step belongs to none.
        operator: that the machine runs; None: the instruction is no call.
        place: of the operator in the list of its function; a body has that of its loop.
        in_place: the result takes the memory of the first operand.
    """

    number: int
    name: str
    source: str = ""
    micro_batch: int = -1
    operator: MachineOperator | None = None
    place: int = -1
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that an IPU holds.

    Args:
        nbytes: of all its copies.
        copies: of a stash, the micro-batches of which it is kept at once.
        spans: steps at which it is live; empty: all.
        maker: the step that makes it; None: it is a variable, a stream or a constant.
        reader: the last step that reads it; None: no step does.
        io_tiles: it is on the tiles that only transfer.
    """

    name: str
    type: TensorType
    nbytes: int
    role: Role
    copies: int = 1
    spans: tuple[Span, ...] = ()
    maker: int | None = None
    reader: int | None = None
    io_tiles: bool = False

    def at(self, step: int) -> bool:
        """Whether it is live at a step."""
        return not self.spans or any(first <= step <= last for first, last in self.spans)


@dataclass(frozen=True)
class IpuLiveness:
    """The steps of an IPU in one step of a program, and the tensors that it holds.

    Micro-batches repeat: their steps are those of one period (`schedule/step_order.py`).
    """

    ipu: int
    steps: tuple[LiveStep, ...]
    tensors: tuple[LiveTensor, ...]

    @property
    def always(self) -> int:
        """Bytes that are live at every step."""
        return sum(tensor.nbytes for tensor in self.tensors if not tensor.spans)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """All live bytes at each step."""
        always = self.always
        return tuple(always + more for more in self.changing())

    def changing(self, roles: Container[Role] = ROLES) -> list[int]:
        """Bytes at each step of the tensors in these roles that are not always live."""
        change = [0] * (len(self.steps) + 1)
        for tensor in self.tensors:
            for first, last in tensor.spans if tensor.role in roles else ():
                change[first] += tensor.nbytes
                change[last + 1] -= tensor.nbytes
        return list(accumulate(change[:-1]))

    def at(self, step: int) -> tuple[LiveTensor, ...]:
        """The tensors that are live at a step, the largest first."""
        live = [tensor for tensor in self.tensors if tensor.at(step)]
        return tuple(sorted(live, key=lambda tensor: -tensor.nbytes))
