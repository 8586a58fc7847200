"""Check the instructions that write variables within a micro-batch."""

from dataclasses import dataclass, field

import torch

from ipu_dynamo.program.ir.instructions import Call, Plain
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.verify.residence import Residence
from ipu_dynamo.program.ir.writes import Accumulate, Accumulation, WriteBuffer

_SHARE = TensorType(torch.float32, ())
_LASTING = ("accumulator", "constant", "loss_scale", "state")  # kinds that are no buffer


@dataclass
class WriteChecks:
    """Follows the instructions of a micro-batch.

    Args:
        has: what is where.

    Attributes:
        begun: the first rule by which each accumulator was written.
    """

    has: Residence
    begun: dict[str, Accumulation] = field(default_factory=dict)
    _pass: tuple[object, ...] = ()  # of the last call
    _made: set[str] = field(default_factory=set)  # results of the calls of this stage pass
    _written: set[str] = field(default_factory=set)
    _behind: bool = False  # nothing but writes has come since the last call

    def follow(self, instruction: Plain) -> None:
        """Take notice of an instruction; a write is checked.

        Raises:
            ValueError: what is wrong with it.
        """
        match instruction:
            case Call():
                if _pass_of(instruction) != self._pass:
                    self._pass, self._made = _pass_of(instruction), set()
                self._made.update(name for name in instruction.results if name)
                self._behind = True
            case Accumulate() | WriteBuffer():
                self._write(instruction)
            case _:
                self._behind = False

    def _write(self, write: Accumulate | WriteBuffer) -> None:
        if not self._behind or _pass_of(write) != self._pass:
            raise ValueError("a write stands behind a call of its stage pass")
        if isinstance(write, Accumulate):
            self._check_rule(write)
            names = write.accumulators
        else:
            names = write.variables
        if len(names) != len(write.values):
            raise ValueError(f"{len(write.values)} values are written to {len(names)} variables")
        if len(set(names)) < len(names):
            raise ValueError("a variable is written twice at once")
        for name, value in zip(names, write.values, strict=True):
            self._check(write, name, value)

    def _check(self, write: Accumulate | WriteBuffer, name: str, value: str) -> None:
        variable = self.has.variable(name)
        if isinstance(write, Accumulate) and variable.kind != "accumulator":
            raise ValueError(f"%{name}, of kind {variable.kind}, is no accumulator")
        if isinstance(write, WriteBuffer) and variable.kind in _LASTING:
            raise ValueError(f"%{name}, of kind {variable.kind}, is no buffer")
        if variable.ipu != write.ipu:
            raise ValueError(f"%{name} is changed away from its owner, ipu{variable.ipu}")
        if value not in self._made:
            raise ValueError(f"%{value} is no result of this stage pass")
        expected, actual = self.has.at(name, write.ipu), self.has.at(value, write.ipu)
        if actual != expected and not (
            isinstance(write, Accumulate) and _summable(actual, expected)
        ):
            raise ValueError(f"%{value} is {actual}, and %{name} is {expected}")
        if isinstance(write, WriteBuffer):
            if name in self._written:
                raise ValueError(f"%{name} is written by another stage pass already")
            self._written.add(name)
            return
        first = self.begun.setdefault(name, write.rule)
        if name in self._written and (first == "mean" or write.rule != "+="):
            raise ValueError(f"%{name} is written before: {write.rule} would lose that")
        self._written.add(name)

    def _check_rule(self, write: Accumulate) -> None:
        if (write.rule == "mean") != (write.weight is not None):
            raise ValueError("a mean, and no other rule, has a share")
        if write.weight is not None and self.has.at(write.weight, write.ipu) != _SHARE:
            raise ValueError(f"the share %{write.weight} is no {_SHARE}")


def _summable(value: TensorType, total: TensorType) -> bool:
    """Whether a sum may have another precision than its terms."""
    floats = value.dtype.is_floating_point and total.dtype.is_floating_point
    return floats and value.shape == total.shape


def _pass_of(instruction: Call | Accumulate | WriteBuffer) -> tuple[object, ...]:
    return instruction.ipu, instruction.stage, instruction.direction, instruction.phase
