"""Check the instructions that write variables within a micro-batch."""

from dataclasses import dataclass, field

from ipu_dynamo.program.ir.instructions import Call, Plain
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.verify.residence import Residence
from ipu_dynamo.program.ir.writes import Accumulate, Accumulation, Write, WriteBuffer


@dataclass
class WriteChecks:
    """Follows the instructions of a micro-batch.

    Args:
        has: what is where.

    Attributes:
        begun: the first rule by which each accumulator was written.
        made: results of the calls of this stage pass.
    """

    has: Residence
    begun: dict[str, Accumulation] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    _pass: tuple[object, ...] = ()  # of the last call
    _written: set[str] = field(default_factory=set)
    _behind: bool = False  # nothing but writes has come since the last call

    def follow(self, instruction: Plain) -> None:
        """Note an instruction; of a write, check conditions outside of its description.

        Raises:
            ValueError: what is wrong with it.
        """
        if isinstance(instruction, Accumulate | WriteBuffer):
            self._write(instruction)
        elif isinstance(instruction, Call):
            if _pass_of(instruction) != self._pass:
                self._pass, self.made = _pass_of(instruction), set()
            self.made.update(instruction.made_names)
            self._behind = True
        else:
            self._behind = False

    def _write(self, write: Accumulate | WriteBuffer) -> None:
        if not self._behind or _pass_of(write) != self._pass:
            raise ValueError("a write stands behind a call of its stage pass")
        if isinstance(write, Accumulate) and (write.rule == "mean") != (write.weight is not None):
            raise ValueError("a mean, and no other rule, has a share")
        names = write.written_names
        if len(names) != len(write.values):
            raise ValueError(f"{len(write.values)} values are written to {len(names)} variables")
        if len(set(names)) < len(names):
            raise ValueError("a variable is written twice at once")
        for one in write.written:
            self._check(one, write.ipu)

    def _check(self, write: Write, ipu: int) -> None:
        name, rule = write.target, write.rule
        expected, actual = self.has.at(name, ipu), self.has.at(write.value, ipu)
        if actual != expected and not (rule != "buffer" and _summable(actual, expected)):
            raise ValueError(f"%{write.value} is {actual}, and %{name} is {expected}")
        if rule == "buffer":
            if name in self._written:
                raise ValueError(f"%{name} is written by another stage pass already")
        else:
            first = self.begun.setdefault(name, rule)
            if name in self._written and (first == "mean" or rule != "+="):
                raise ValueError(f"%{name} is written before: {rule} would lose that")
        self._written.add(name)


def _summable(value: TensorType, total: TensorType) -> bool:
    """Whether a sum may have another precision than its terms."""
    floats = value.dtype.is_floating_point and total.dtype.is_floating_point
    return floats and value.shape == total.shape


def _pass_of(instruction: Call | Accumulate | WriteBuffer) -> tuple[object, ...]:
    return instruction.ipu, instruction.stage, instruction.direction, instruction.phase
